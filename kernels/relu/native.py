"""`relu` in C++: its arguments, mirrored from `native.h`."""

from torch import Tensor

from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Node, as_tensor, value_of


class ReluArguments(Arguments):
    """See `ReluArgs`."""

    _fields_ = (("x", Matrix), ("out", Matrix))


def record(x: Tensor) -> Tensor:
    """Record the activation."""
    value = value_of(x)

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return ReluArguments(inputs[0], outputs[0])

    node = Node("relu", [value], [Buffer(value.width)], bind, is_row_wise=True, in_place=0, activation="relu")
    return as_tensor(value.recorder.append(node, value.dims))
