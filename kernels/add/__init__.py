"""Sums of two matrices: the residual connection."""

from torch import Tensor

from octavo.kernels.add import cpu, native
from octavo.kernels.dispatch import choose, require

_IMPLEMENTATIONS = {
    "cpu": cpu.add,
    "recorded": native.record,
    "cuda": cpu.add,
}


def add(a: Tensor, b: Tensor) -> Tensor:
    """Return `a + b`, rounded once to their dtype.

    Raises:
        ShapeError: the shapes differ.
        UnsupportedDevice: no implementation for the device.
    """
    require(a.shape == b.shape, f"add: {tuple(a.shape)} and {tuple(b.shape)}")
    return choose("add", _IMPLEMENTATIONS, a.device)(a, b)
