"""Reference of `relu`."""

import torch
from torch import Tensor


def relu(x_TF: Tensor) -> Tensor:
    """See `octavo.kernels.relu.relu`."""
    return torch.where(x_TF <= 0, torch.zeros_like(x_TF), x_TF)
