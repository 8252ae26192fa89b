"""Selects with torch and sorts only what was selected."""

import torch
from torch import Tensor


def top_k(values_V: Tensor, k: int) -> Tensor:
    """See the contract in the package.

    `torch.topk` leaves open which of several equal values it takes, so it only finds the threshold.
    """
    if k >= values_V.numel():
        return values_V.argsort(descending=True, stable=True)
    threshold = torch.topk(values_V, k, sorted=False).values.min()
    indices = (values_V >= threshold).nonzero().squeeze(1)
    order = values_V[indices].argsort(descending=True, stable=True)
    return indices[order[:k]]
