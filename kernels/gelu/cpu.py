"""`gelu` on the CPU through torch.

Uses `torch.tanh` and `torch.erf`, which have one routine for all elements of a contiguous tensor; torch's
own gelu uses another routine for the elements that do not fill a vector.
"""

import math

import torch
from torch import Tensor


def gelu(x_TF: Tensor, uses_tanh: bool) -> Tensor:
    """See `octavo.kernels.gelu.gelu`."""
    x32_TF = x_TF.float().contiguous()
    if uses_tanh:
        inner_TF = (x32_TF * x32_TF * x32_TF).mul_(0.044715).add_(x32_TF).mul_(math.sqrt(2.0 / math.pi))
        share_TF = torch.tanh(inner_TF)
    else:
        share_TF = torch.erf(x32_TF * math.sqrt(0.5))
    return share_TF.add_(1.0).mul_(0.5).mul_(x32_TF).to(x_TF.dtype)
