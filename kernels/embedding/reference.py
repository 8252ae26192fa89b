"""Reference of `embedding`."""

import torch
from torch import Tensor


def embedding(ids_T: Tensor, table_VD: Tensor, first_id: int | None = None) -> Tensor:
    """See `octavo.kernels.embedding.embedding`."""
    entries = dict(enumerate(table_VD, first_id or 0))
    return torch.stack([entries.get(int(index), torch.zeros_like(table_VD[0])) for index in ids_T])
