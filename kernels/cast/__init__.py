"""Conversion to another float type."""

import torch
from torch import Tensor

from octavo.kernels.cast import cpu
from octavo.kernels.dispatch import choose, lazy

_IMPLEMENTATIONS = {
    "cpu": cpu.cast,
    "cuda": lazy("octavo.kernels.cast.gpu", cpu.cast),
}


def cast(x_TD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in `dtype`: rounded to the nearest, ties to even; NaN stays NaN.

    As bfloat16, numbers below its smallest normal one may become zero.

    Raises:
        UnsupportedDevice: no implementation for the device.
    """
    return choose("cast", _IMPLEMENTATIONS, x_TD.device)(x_TD, dtype)
