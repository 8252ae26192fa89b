"""The formulas for rounding rows to 8 or 12 bits."""

from typing import Literal, get_args

import torch

Scaling = Literal["magnitude", "range", "reciprocal", "int12"]
"""How the scale of a group is computed from its largest magnitude, and a level from a number.

* magnitude: scale = magnitude / 127, level = x * (127 / magnitude).
* range: scale = magnitude / 127.5, half of the range of levels; level = x / scale, limited to -128 and 127. The formula
  of compressed-tensors.
* reciprocal: the same, but scale is at least 2^-23, and level = x * (1 / scale). The formula of torchao.
* int12: scale = magnitude / 2047, level = x * (2047 / magnitude). For weights whose checkpoint does not quantize rows.

Levels are rounded to the nearest integer, ties to even. All numbers are float32.
"""
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
"""Names in the order of `octavo::Scaling`."""
SMALLEST_RECIPROCAL = 2.0**-23
"""The smallest scale of `reciprocal`."""


def level_type(scaling: Scaling) -> torch.dtype:
    """Return the type that stores the levels."""
    return torch.int16 if scaling == "int12" else torch.int8


def largest_level(scaling: Scaling) -> int:
    """Return the largest level; the lowest level is its negative minus one."""
    return 2047 if scaling == "int12" else 127
