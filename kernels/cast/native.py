"""`cast` in C++: its arguments, mirrored from `native.h`."""

import torch

from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Node, Value


class CastArguments(Arguments):
    """See `CastArgs`."""

    _fields_ = (("x", Matrix), ("out", Matrix))


def cast_node(value: Value) -> Node:
    """Return the operation that stores a value in 16 bits."""

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return CastArguments(inputs[0], outputs[0])

    return Node("cast", [value], [Buffer(value.width, torch.bfloat16)], bind, is_row_wise=True)
