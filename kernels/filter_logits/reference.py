"""Defines the filters: sorts everything, and cuts three times. `weights.py` defines the arithmetic of the last cut."""

import math

import torch
from torch import Tensor

from octavo.kernels.filter_logits.weights import target_weight, weights_of


def filter_logits(logits_V: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """See the contract in the package."""
    order = logits_V.argsort(descending=True, stable=True)
    logits = logits_V[order]
    if min_p > 0:
        # In float32, so the sum is rounded before the comparison.
        num_kept = int((logits >= logits[0] + torch.tensor(math.log(min_p), dtype=torch.float32)).sum())
        order, logits = order[:num_kept], logits[:num_kept]
    if top_k > 0:
        order, logits = order[:top_k], logits[:top_k]
    if top_p < 1:
        weights = weights_of(logits, logits[0])
        weight_before = weights.cumsum(0) - weights
        order = order[weight_before < target_weight(top_p, int(weights.sum()))]
    return order.sort().values
