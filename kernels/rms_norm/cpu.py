"""`rms_norm` on the CPU through torch."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See `octavo.kernels.rms_norm.rms_norm`."""
    # torch sums contiguous rows in one order; strided rows may use another loop.
    x32_TD = x.reshape(-1, x.shape[-1]).contiguous().float()
    inverse_T1 = torch.rsqrt(x32_TD.square().mean(dim=1, keepdim=True).add_(eps))
    normalized_TD = (x32_TD * inverse_T1).to(weight_D.dtype) * weight_D
    return normalized_TD.to(x.dtype).view(x.shape)
