"""`gelu_and_mul` in C++: its arguments, mirrored from `native.h`."""

import ctypes

from torch import Tensor

from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Node, as_tensor, value_of


class GeluAndMulArguments(Arguments):
    """See `GeluAndMulArgs`."""

    _fields_ = (("x", Matrix), ("out", Matrix), ("uses_tanh", ctypes.c_int64))


def record(gate_up_T2F: Tensor, uses_tanh: bool) -> Tensor:
    """Record the activation."""
    value = value_of(gate_up_T2F)
    width = value.width // 2

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return GeluAndMulArguments(inputs[0], outputs[0], int(uses_tanh))

    activation = "gelu_tanh_and_mul" if uses_tanh else "gelu_and_mul"
    node = Node("gelu_and_mul", [value], [Buffer(width)], bind, is_row_wise=True, activation=activation)
    return as_tensor(value.recorder.append(node, (width,)))
