"""Reference of `gelu`."""

import math

import torch
from torch import Tensor


def gelu(x_TF: Tensor, uses_tanh: bool) -> Tensor:
    """See `octavo.kernels.gelu.gelu`."""
    x32_TF = x_TF.float()
    if uses_tanh:
        share_TF = 0.5 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x32_TF + 0.044715 * x32_TF**3)))
    else:
        share_TF = 0.5 * (1.0 + torch.erf(x32_TF / math.sqrt(2.0)))
    return (x32_TF * share_TF).to(x_TF.dtype)
