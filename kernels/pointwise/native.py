"""`pointwise` in C++: its arguments, mirrored from `native.h`."""

import ctypes

from torch import Tensor

from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Node, as_tensor, value_of
from octavo.kernels.pointwise.functions import Function


class PointwiseArguments(Arguments):
    """See `PointwiseArgs`."""

    _fields_ = (("x", Matrix), ("out", Matrix), ("function", ctypes.c_int64), ("parameter", ctypes.c_float))


def record(function: Function, x: Tensor, parameter: float) -> Tensor:
    """Record the function of all columns."""
    value = value_of(x)

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return PointwiseArguments(inputs[0], outputs[0], int(function), parameter)

    node = Node("pointwise", [value], [Buffer(value.width)], bind, is_row_wise=True, in_place=0)
    return as_tensor(value.recorder.append(node, value.dims))
