"""`silu_and_mul` in C++: its arguments, mirrored from `native.h`."""

from torch import Tensor

from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Node, as_tensor, value_of


class SiluAndMulArguments(Arguments):
    """See `SiluAndMulArgs`."""

    _fields_ = (("x", Matrix), ("out", Matrix))


def record(gate_up_T2F: Tensor) -> Tensor:
    """Record the activation."""
    value = value_of(gate_up_T2F)
    width = value.width // 2

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return SiluAndMulArguments(inputs[0], outputs[0])

    node = Node("silu_and_mul", [value], [Buffer(width)], bind, is_row_wise=True, activation="silu_and_mul")
    return as_tensor(value.recorder.append(node, (width,)))
