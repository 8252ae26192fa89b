"""Rows of a table by index: embeddings of tokens and positions, and tables of angles."""

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.embedding import cpu, native

_IMPLEMENTATIONS = {
    "cpu": cpu.embedding,
    "recorded": native.record,
    "cuda": lazy("octavo.kernels.embedding.gpu", cpu.embedding),
}
_OF_SEVERAL = {
    "cpu": cpu.embeddings,
    "recorded": native.record_all,
    "cuda": lazy("octavo.kernels.embedding.gpu", cpu.embeddings),
}


def embedding(ids_T: Tensor, table_VD: Tensor, first_id: int | None = None) -> Tensor:
    """Return the rows of `table` that `ids` name, shape TD, in the dtype of the table.

    Args:
        ids_T: int64. Without `first_id` they must be below V, which is not checked here. Rows of negative ids are
            replaced or never read. On a GPU they are NaN, so that padding causes no work where the work depends on
            values, as in a mixture of experts.
        table_VD: one row for each id.
        first_id: first id of the table, if it is a part of a larger one; ids outside of it get zeros.

    Raises:
        ShapeError: the arguments have other shapes.
        UnsupportedDevice: no implementation for the device.
    """
    _require_lookup(ids_T, table_VD)
    return choose("embedding", _IMPLEMENTATIONS, ids_T.device)(ids_T, table_VD, first_id)


def embeddings(*lookups: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return `embedding` for each pair of indices and a table. All pairs have the same number of indices.

    Raises:
        ShapeError: the arguments have other shapes.
        UnsupportedDevice: no implementation for the device.
    """
    ids_T = lookups[0][0]
    for lookup in lookups:
        _require_lookup(*lookup)
        require(
            lookup[0].shape == ids_T.shape, f"embeddings: {tuple(lookup[0].shape)} and {tuple(ids_T.shape)} indices"
        )
    return choose("embeddings", _OF_SEVERAL, ids_T.device)(*lookups)


def _require_lookup(ids_T: Tensor, table_VD: Tensor) -> None:
    require(
        len(ids_T.shape) == 1 and table_VD.ndim == 2,
        f"embedding: indices {tuple(ids_T.shape)} into a table {tuple(table_VD.shape)}",
    )
