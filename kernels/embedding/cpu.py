"""`embedding` on the CPU through torch: a copy of rows, which no batch can change."""

from torch import Tensor


def embedding(ids_T: Tensor, table_VD: Tensor) -> Tensor:
    """See `octavo.kernels.embedding.embedding`."""
    return table_VD.index_select(0, ids_T)


def embeddings(*lookups: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """See `octavo.kernels.embedding.embeddings`."""
    return tuple(embedding(*lookup) for lookup in lookups)
