"""Defines the filters: sort everything in float64, and cut three times."""

import math

import torch
from torch import Tensor


def filter_logits(logits_V: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """See the contract in the package."""
    order = logits_V.argsort(descending=True, stable=True)
    logits = logits_V[order].double()
    if min_p > 0:
        num_kept = int((logits >= logits[0] + math.log(min_p)).sum())
        order, logits = order[:num_kept], logits[:num_kept]
    if top_k > 0:
        order, logits = order[:top_k], logits[:top_k]
    if top_p < 1:
        mass_before = torch.softmax(logits, 0).cumsum(0) - torch.softmax(logits, 0)
        order = order[mass_before < top_p]
    return order.sort().values
