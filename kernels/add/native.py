"""`add` in C++: its arguments, mirrored from `native.h`."""

from torch import Tensor

from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Node, as_tensor, value_of


class AddArguments(Arguments):
    """See `AddArgs`."""

    _fields_ = (("a", Matrix), ("b", Matrix), ("out", Matrix))


def record(a: Tensor, b: Tensor) -> Tensor:
    """Record the sum."""
    left, right = value_of(a), value_of(b)

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return AddArguments(inputs[0], inputs[1], outputs[0])

    node = Node("add", [left, right], [Buffer(left.width)], bind, is_row_wise=True, in_place=0)
    return as_tensor(left.recorder.append(node, left.dims))
