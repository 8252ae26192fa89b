"""`embedding` in C++: its arguments, mirrored from `native.h`."""

import ctypes

from torch import Tensor

from octavo.kernels.native.arguments import TYPES, Arguments, Matrix
from octavo.kernels.native.value import Buffer, Node, as_tensor, ids_of

SOURCES = {"token_ids": 0, "positions": 1}
"""The numbers of `octavo::IndexSource`: the members of a step that index a table."""


class EmbeddingArguments(Arguments):
    """See `EmbeddingArgs`. The indices of a step, with the offset added, must lie within the table."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("table_type", ctypes.c_int32),
        ("source", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("out", Matrix),
    )


def record(ids_T: Tensor, table_VD: Tensor) -> Tensor:
    """Record the look-up."""
    ids = ids_of(ids_T)
    table = table_VD.contiguous()
    width = table.shape[1]

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return EmbeddingArguments(table.data_ptr(), TYPES[table.dtype], SOURCES[ids.source], ids.offset, outputs[0])

    node = Node("embedding", [], [Buffer(width)], bind, is_row_wise=True, keeps=[table])
    return as_tensor(ids.recorder.append(node, (width,)))
