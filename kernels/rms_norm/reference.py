"""Reference of `rms_norm`."""

import torch
from torch import Tensor


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See `octavo.kernels.rms_norm.rms_norm`."""
    x32_TD = x_TD.float()
    normalized_TD = x32_TD / torch.sqrt((x32_TD * x32_TD).mean(dim=1, keepdim=True) + eps)
    return (normalized_TD.to(weight_D.dtype) * weight_D).to(x_TD.dtype)
