"""The functions of `pointwise`, by the numbers that C++ and Triton use."""

from enum import IntEnum


class Function(IntEnum):
    """See `octavo::PointwiseFunction`. Each has one parameter."""

    SCALE = 0
    SOFT_CAP = 1
    CLAMP = 2
    RELU_SQUARED = 3
