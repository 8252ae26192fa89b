"""`embedding` on the CPU through torch: a copy of rows, which no batch can change."""

from torch import Tensor


def embedding(ids_T: Tensor, table_VD: Tensor, first_id: int | None = None) -> Tensor:
    """See `octavo.kernels.embedding.embedding`."""
    if first_id is None:
        return table_VD.index_select(0, ids_T.clamp(min=0))
    indices_T = ids_T - first_id
    is_here_T = (indices_T >= 0) & (indices_T < len(table_VD))
    return table_VD.index_select(0, indices_T.clamp(0, len(table_VD) - 1)).where(is_here_T[:, None], 0)


def embeddings(*lookups: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """See `octavo.kernels.embedding.embeddings`."""
    return tuple(embedding(*lookup) for lookup in lookups)
