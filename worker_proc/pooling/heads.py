"""The layers after pooling: computed in float32 on the host, one vector at a time, so that bits depend on nothing else.

A head has few numbers compared with its model: even a million would take a tenth of a millisecond per vector.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.protocol.errors import ConfigError
from octavo.protocol.pooling import Activation, DenseLayer
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.pooling.collected import Floats


def _gelu(x: Floats) -> Floats:
    values = torch.from_numpy(x)
    result: Floats = (0.5 * values * (1.0 + torch.special.erf(values * 0.5**0.5))).numpy()
    return result


def _sigmoid(x: Floats) -> Floats:
    result: Floats = (1.0 / (1.0 + np.exp(-x, dtype=np.float64))).astype(np.float32)
    return result


def _softmax(x: Floats) -> Floats:
    exponents = np.exp((x - x.max(-1, keepdims=True)).astype(np.float64))
    result: Floats = (exponents / exponents.sum(-1, keepdims=True)).astype(np.float32)
    return result


ACTIVATIONS: dict[Activation, Callable[[Floats], Floats]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "gelu": _gelu,
    "relu": lambda x: np.maximum(x, np.float32(0)),
    "sigmoid": _sigmoid,
    "softmax": _softmax,
}


class HeadLayer(Protocol):
    """One layer of a head."""

    def prepare(self) -> None:
        """Read the weights, which may have changed; called before the first vector."""

    def __call__(self, x_I: Floats) -> Floats:
        """Return the layer's output for one vector."""


@dataclass(slots=True, eq=False)
class Dense:
    """`activation(weight @ x + bias)`.

    The tensors are parameters of the model, or are read from a file of their own.
    """

    weight_OI: Tensor
    bias_O: Tensor | None
    activation: Activation = "identity"
    _arrays: tuple[Floats, Floats | None] = field(init=False)

    @classmethod
    def new(
        cls,
        parameters: Parameters,
        name: str,
        num_inputs: int,
        num_outputs: int,
        *,
        has_bias: bool,
        activation: Activation = "identity",
    ) -> "Dense":
        """Make the layer that the checkpoint calls `name`."""
        weight_OI = parameters.new(f"{name}.weight", num_outputs, num_inputs, dtype=torch.float32)
        bias_O = parameters.new(f"{name}.bias", num_outputs, dtype=torch.float32) if has_bias else None
        return cls(weight_OI, bias_O, activation)

    def prepare(self) -> None:
        """See `HeadLayer`."""
        self._arrays = (_array(self.weight_OI), None if self.bias_O is None else _array(self.bias_O))

    def __call__(self, x_I: Floats) -> Floats:
        """See `HeadLayer`."""
        weight_OI, bias_O = self._arrays
        y_O = weight_OI @ x_I
        return ACTIVATIONS[self.activation](y_O if bias_O is None else y_O + bias_O)


@dataclass(slots=True, eq=False)
class HeadNorm:
    """Layer norm."""

    weight_D: Tensor
    bias_D: Tensor | None
    eps: float
    _arrays: tuple[Floats, Floats | None] = field(init=False)

    @classmethod
    def new(cls, parameters: Parameters, name: str, width: int, eps: float, *, has_bias: bool) -> "HeadNorm":
        """Make the norm that the checkpoint calls `name`."""
        weight_D = parameters.new(f"{name}.weight", width, dtype=torch.float32)
        bias_D = parameters.new(f"{name}.bias", width, dtype=torch.float32) if has_bias else None
        return cls(weight_D, bias_D, eps)

    def prepare(self) -> None:
        """See `HeadLayer`."""
        self._arrays = (_array(self.weight_D), None if self.bias_D is None else _array(self.bias_D))

    def __call__(self, x_I: Floats) -> Floats:
        """See `HeadLayer`."""
        weight_D, bias_D = self._arrays
        centred_D = x_I - x_I.mean(dtype=np.float64)
        factor = 1.0 / np.sqrt((centred_D * centred_D).mean() + self.eps)
        y_D: Floats = (centred_D * factor).astype(np.float32) * weight_D
        return y_D if bias_D is None else y_D + bias_D


class PoolingHead:
    """The layers after pooling, in order.

    Args:
        layers: layers of the checkpoint.
        dense: further layers, of Sentence Transformers, whose weights are read now.

    Raises:
        ConfigError: weights of `dense` are missing or have another shape.
    """

    def __init__(self, layers: Sequence[HeadLayer] = (), dense: Sequence[DenseLayer] = ()) -> None:
        self._layers = [*layers, *map(_read_dense, dense)]

    @property
    def is_empty(self) -> bool:
        """Whether the head changes nothing."""
        return not self._layers

    def prepare(self) -> None:
        """Read the weights, which may have changed."""
        for layer in self._layers:
            layer.prepare()

    def __call__(self, x_D: Floats) -> Floats:
        """Return the output for one vector."""
        for layer in self._layers:
            x_D = layer(x_D)
        return x_D


def _array(tensor: Tensor) -> Floats:
    array: Floats = tensor.detach().float().cpu().numpy()
    return array


def _read_dense(layer: DenseLayer) -> Dense:
    weights = _weights_in(Path(layer.path))
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (layer.num_outputs, layer.num_inputs)}
    if layer.has_bias:
        shapes["linear.bias"] = (layer.num_outputs,)
    for name, shape in shapes.items():
        if name not in weights or tuple(weights[name].shape) != shape:
            found = list(weights[name].shape) if name in weights else "missing"
            raise ConfigError(f"{layer.path}: {name} is {found}, not {list(shape)}", hint="check the model's files")
    return Dense(weights["linear.weight"], weights.get("linear.bias"), layer.activation)


def _weights_in(folder: Path) -> dict[str, Tensor]:
    if (path := folder / "model.safetensors").is_file():
        from safetensors.torch import load_file  # few models have such layers

        found: dict[str, Any] = load_file(path)
        return found
    if (path := folder / "pytorch_model.bin").is_file():
        loaded: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        return loaded
    raise ConfigError(
        f"{folder} has neither model.safetensors nor pytorch_model.bin", hint="complete the model's files"
    )
