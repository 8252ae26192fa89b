"""Rows of a table by index: embeddings of tokens and positions, and tables of angles."""

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.embedding import cpu, native

_IMPLEMENTATIONS = {
    "cpu": cpu.embedding,
    "recorded": native.record,
    "cuda": lazy("octavo.kernels.embedding.gpu", cpu.embedding),
}


def embedding(ids_T: Tensor, table_VD: Tensor) -> Tensor:
    """Return the rows of `table` that `ids` name, shape TD, in the dtype of the table.

    Args:
        ids_T: int64 from 0 to V - 1, not checked here.
        table_VD: one row for each index.

    Raises:
        ShapeError: the arguments have other shapes.
        UnsupportedDevice: no implementation for the device.
    """
    require(
        len(ids_T.shape) == 1 and table_VD.ndim == 2,
        f"embedding: indices {tuple(ids_T.shape)} into a table {tuple(table_VD.shape)}",
    )
    return choose("embedding", _IMPLEMENTATIONS, ids_T.device)(ids_T, table_VD)
