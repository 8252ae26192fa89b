"""`embedding` in C++: its arguments, mirrored from `native.h`."""

import ctypes

from torch import Tensor

from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Ids, Node, as_tensor, ids_of

SOURCES = {"token_ids": 0, "positions": 1}
"""The numbers of `octavo::IndexSource`: the members of a step that index a table."""


class EmbeddingArguments(Arguments):
    """See `EmbeddingArgs`."""

    _fields_ = (
        ("table", Matrix),
        ("out", Matrix),
        ("offset", ctypes.c_int64),
        ("num_entries", ctypes.c_int64),
        ("source", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


def record(ids_T: Tensor, table_VD: Tensor, first_id: int | None = None) -> Tensor:
    """Record the lookup."""
    ids = ids_of(ids_T) + -(first_id or 0)
    output = Buffer(table_VD.shape[1])
    return as_tensor(ids.recorder.append(embedding_node(ids, table_VD, output), (output.width,)))


def record_all(*lookups: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Record several lookups."""
    return tuple(record(*lookup) for lookup in lookups)


def embedding_node(ids: Ids, table_VD: Tensor, output: Buffer) -> Node:
    """Return the operation that writes the rows of a table, whose rows may lie apart, to a buffer."""

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return EmbeddingArguments(Matrix.of(table_VD), outputs[0], ids.offset, len(table_VD), SOURCES[ids.source], 0)

    return Node("embedding", [], [output], bind, is_row_wise=True, keep_alive=[table_VD])
