"""The formulas by which rows are rounded to 8 bits."""

from typing import Literal, get_args

Scaling = Literal["magnitude", "range", "reciprocal"]
"""How the scale of a group follows from its largest magnitude, and a level from a number.

* magnitude: scale = magnitude / 127, level = x * (127 / magnitude).
* range: scale = magnitude / 127.5, half of the range of levels; level = x / scale, limited to -128 and 127. The formula
  of compressed-tensors.
* reciprocal: the same, but scale is at least 2^-23, and level = x * (1 / scale). The formula of torchao.

Levels are rounded to the nearest integer, ties to even. All numbers are float32.
"""
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
"""In the order of `octavo::Scaling`."""
