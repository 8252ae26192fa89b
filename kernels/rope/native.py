"""`rope` in C++: its arguments, mirrored from `native.h`."""

import ctypes

from torch import Tensor

from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Node, as_tensor, value_of


class RopeArguments(Arguments):
    """See `RopeArgs`. The width of the angles is at most half of the head dimension."""

    _fields_ = (("x", Matrix), ("out", Matrix), ("cos", Matrix), ("sin", Matrix), ("head_dim", ctypes.c_int64))


def record(x_TNH: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """Record the rotation."""
    value = value_of(x_TNH)

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        x, cos, sin = inputs
        return RopeArguments(x, outputs[0], cos, sin, value.dims[-1])

    inputs = [value, value_of(cos_TC), value_of(sin_TC)]
    node = Node("rope", inputs, [Buffer(value.width)], bind, is_row_wise=True, in_place=0)
    return as_tensor(value.recorder.append(node, value.dims))
