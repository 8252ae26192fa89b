"""Activation functions by their names in `config.json`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from octavo.kernels.gelu import gelu
from octavo.kernels.gelu_and_mul import gelu_and_mul
from octavo.kernels.pointwise import relu_squared, scale
from octavo.kernels.relu import relu
from octavo.kernels.sigmoid_and_mul import sigmoid_and_mul
from octavo.kernels.silu_and_mul import silu_and_mul
from octavo.protocol.errors import ConfigError

Activation = Callable[[Tensor], Tensor]


def quick_gelu(x: Tensor) -> Tensor:
    """Return `x * sigmoid(1.702 * x)`: CLIP."""
    return sigmoid_and_mul(scale(x, 1.702), x)


PLAIN: dict[str, Activation] = {
    "gelu": partial(gelu, uses_tanh=False),
    "gelu_new": partial(gelu, uses_tanh=True),
    "gelu_fast": partial(gelu, uses_tanh=True),
    "gelu_pytorch_tanh": partial(gelu, uses_tanh=True),
    "quick_gelu": quick_gelu,
    "relu": relu,
    "relu2": relu_squared,
}
"""Functions from TF to TF."""
GATED: dict[str, Activation] = {
    "silu": silu_and_mul,
    "swish": silu_and_mul,
    "gelu": partial(gelu_and_mul, uses_tanh=False),
    "gelu_new": partial(gelu_and_mul, uses_tanh=True),
    "gelu_pytorch_tanh": partial(gelu_and_mul, uses_tanh=True),
}
"""Functions from gates and ups side by side, T2F, to TF."""


def activation(
    config: Mapping[str, Any], default: str, table: Mapping[str, Activation], *, key: str = "hidden_act"
) -> str:
    """Return the name of the activation function in `config.json`.

    Raises:
        ConfigError: `table` does not have it.
    """
    name = default if config.get(key) is None else config[key]
    if name not in table:
        raise ConfigError(f"config.json: {key!r} is {name!r}; only {', '.join(sorted(table))} is supported")
    return str(name)
