"""`gelu` in C++: its arguments, mirrored from `native.h`."""

import ctypes

from torch import Tensor

from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Node, as_tensor, value_of


class GeluArguments(Arguments):
    """See `GeluArgs`."""

    _fields_ = (("x", Matrix), ("out", Matrix), ("uses_tanh", ctypes.c_int64))


def record(x: Tensor, uses_tanh: bool) -> Tensor:
    """Record the activation."""
    value = value_of(x)

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return GeluArguments(inputs[0], outputs[0], int(uses_tanh))

    node = Node(
        "gelu",
        [value],
        [Buffer(value.width)],
        bind,
        is_row_wise=True,
        in_place=0,
        activation="gelu_tanh" if uses_tanh else "gelu",
    )
    return as_tensor(value.recorder.append(node, value.dims))
