"""`multiply` in C++: its arguments, mirrored from `native.h`."""

import ctypes

from torch import Tensor

from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Node, as_tensor, value_of


class MultiplyArguments(Arguments):
    """See `MultiplyArgs`."""

    _fields_ = (("x", Matrix), ("gate", Matrix), ("out", Matrix), ("has_silu", ctypes.c_int64))


def record(x_TD: Tensor, gate_TG: Tensor, *, has_silu: bool) -> Tensor:
    """Record the product."""
    x, gate = value_of(x_TD), value_of(gate_TG)

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return MultiplyArguments(*inputs, *outputs, int(has_silu))

    node = Node("multiply", [x, gate], [Buffer(x.width)], bind, is_row_wise=True, in_place=0)
    return as_tensor(x.recorder.append(node, (x.width,)))
