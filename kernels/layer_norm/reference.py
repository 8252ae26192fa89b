"""Reference of `layer_norm`."""

import torch
from torch import Tensor


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """See `octavo.kernels.layer_norm.layer_norm`."""
    x32_TD = x_TD.float()
    centered_TD = x32_TD - x32_TD.mean(dim=-1, keepdim=True)
    variance_T1 = (centered_TD * centered_TD).mean(dim=-1, keepdim=True)
    normalized_TD = centered_TD / torch.sqrt(variance_T1 + eps)
    return (normalized_TD * weight_D.float() + bias_D.float()).to(x_TD.dtype)
