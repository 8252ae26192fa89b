"""Reference of `cast`: the nearest number of the new type; ties go to the one whose last bit is 0."""

import math

import torch
from torch import Tensor

_FORMATS = {torch.float32: (23, -126, 127), torch.bfloat16: (7, -126, 127), torch.float16: (10, -14, 15)}
"""Bits of the fraction, least and greatest exponent of a normal number."""


def cast(x_TD: Tensor, dtype: torch.dtype) -> Tensor:
    """See `octavo.kernels.cast.cast`."""
    rounded = [_round(float(value), *_FORMATS[dtype]) for value in x_TD.flatten()]
    return torch.tensor(rounded, dtype=torch.float64).to(dtype).view(x_TD.shape)


def _round(value: float, fraction_bits: int, least: int, greatest: int) -> float:
    if value == 0.0 or not math.isfinite(value):
        return value
    exponent = max(math.frexp(value)[1] - 1, least)
    unit = 2.0 ** (exponent - fraction_bits)
    result = round(value / unit) * unit  # Python's round takes ties to even
    return math.copysign(math.inf if abs(result) >= 2.0 ** (greatest + 1) else result, value)
