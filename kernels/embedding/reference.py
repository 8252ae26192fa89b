"""What `embedding` means."""

import torch
from torch import Tensor


def embedding(ids_T: Tensor, table_VD: Tensor) -> Tensor:
    """See `octavo.kernels.embedding.embedding`."""
    return torch.stack([table_VD[int(index)] for index in ids_T])
