"""The gelu activation, in its exact and its tanh form."""

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy
from octavo.kernels.gelu import cpu, native

_IMPLEMENTATIONS = {
    "cpu": cpu.gelu,
    "recorded": native.record,
    "cuda": lazy("octavo.kernels.gelu.gpu", cpu.gelu),
}


def gelu(x_TF: Tensor, *, uses_tanh: bool) -> Tensor:
    """Return `x` times the normal distribution function of `x`, or its approximation by tanh.

    Computed in float32 and rounded once, to the dtype of `x`.

    Args:
        x_TF: any shape.
        uses_tanh: the approximation, "gelu_new" and "gelu_pytorch_tanh" in model configurations.

    Raises:
        UnsupportedDevice: no implementation for the device.
    """
    return choose("gelu", _IMPLEMENTATIONS, x_TF.device)(x_TF, uses_tanh)
