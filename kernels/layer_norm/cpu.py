"""`layer_norm` on the CPU through torch."""

import torch
from torch import Tensor


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """See `octavo.kernels.layer_norm.layer_norm`."""
    # torch's kernel gives one task whole rows, each summed alone, so a row's bits do not depend on the others.
    if x_TD.ndim == 2:
        return torch.layer_norm(x_TD.contiguous(), weight_D.shape, weight_D, bias_D, eps)
    normalized_TNH = torch.layer_norm(x_TD.float().contiguous(), x_TD.shape[2:], None, None, eps)
    return (normalized_TNH * weight_D.float() + bias_D.float()).to(x_TD.dtype)
