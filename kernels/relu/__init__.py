"""The relu activation: the positive part of each number."""

from torch import Tensor

from octavo.kernels.dispatch import choose
from octavo.kernels.relu import cpu, native

_IMPLEMENTATIONS = {
    "cpu": cpu.relu,
    "recorded": native.record,
    "cuda": cpu.relu,
}


def relu(x_TF: Tensor) -> Tensor:
    """Return `x` where it is positive, else 0; NaN stays NaN.

    Raises:
        UnsupportedDevice: no implementation for the device.
    """
    return choose("relu", _IMPLEMENTATIONS, x_TF.device)(x_TF)
