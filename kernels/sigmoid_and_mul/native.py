"""`sigmoid_and_mul` in C++: its arguments, mirrored from `native.h`."""

from torch import Tensor

from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Node, as_tensor, value_of


class SigmoidAndMulArguments(Arguments):
    """See `SigmoidAndMulArgs`."""

    _fields_ = (("gate", Matrix), ("x", Matrix), ("out", Matrix))


def record(gate_TG: Tensor, x_TD: Tensor) -> Tensor:
    """Record the product."""
    gate, x = value_of(gate_TG), value_of(x_TD)

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return SigmoidAndMulArguments(*inputs, *outputs)

    node = Node("sigmoid_and_mul", [gate, x], [Buffer(x.width)], bind, is_row_wise=True, in_place=1)
    return as_tensor(x.recorder.append(node, (x.width,)))
