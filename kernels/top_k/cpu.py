"""Selects with torch, and sorts only the selected values."""

import torch
from torch import Tensor


def top_k(values_V: Tensor, k: int) -> Tensor:
    """See the contract in the package.

    `torch.topk` does not define which of several equal values it returns, so it is only used to find the threshold.
    """
    if k >= values_V.numel():
        return values_V.argsort(descending=True, stable=True)
    threshold = torch.topk(values_V, k, sorted=False).values.min()
    indices = (values_V >= threshold).nonzero().squeeze(1)
    order = values_V[indices].argsort(descending=True, stable=True)
    return indices[order[:k]]
