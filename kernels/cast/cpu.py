"""`cast` on the CPU through torch."""

import torch
from torch import Tensor


def cast(x_TD: Tensor, dtype: torch.dtype) -> Tensor:
    """See `octavo.kernels.cast.cast`."""
    return x_TD.to(dtype)
