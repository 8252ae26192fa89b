"""The filters without sorting the vocabulary."""

import math

import torch
from torch import Tensor

from octavo.kernels.filter_logits.weights import target_weight, weights_of
from octavo.kernels.top_k import top_k as select_top_k


def filter_logits(logits_V: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """See the contract in the package."""
    ids = torch.arange(logits_V.numel())
    logits = logits_V
    if min_p > 0:
        least = logits.max() + torch.tensor(math.log(min_p), dtype=torch.float32)
        ids = (logits >= least).nonzero().squeeze(1)
        logits = logits[ids]
    if 0 < top_k < logits.numel():
        kept = select_top_k(logits, top_k).sort().values
        ids, logits = ids[kept], logits[kept]
    if top_p < 1:
        ids = ids[_nucleus(logits, top_p)]
    return ids


def _nucleus(logits_C: Tensor, top_p: float) -> Tensor:
    """Return the ascending indices of the shortest list of probability `top_p`.

    Tokens above a threshold are a prefix of the sorted order. If their weight reaches `top_p`, the nucleus is among
    them, and only they need sorting. The first threshold is 1/256 of the largest probability; the last one is above
    weights of 0.
    """
    largest = logits_C.max()
    weights_C = weights_of(logits_C, largest)
    target = target_weight(top_p, int(weights_C.sum()))
    likely = torch.empty(0, dtype=torch.int64)
    for distance in (5.5, 11.0, 22.0, 44.0):
        likely = (logits_C >= largest - distance).nonzero().squeeze(1)
        if weights_C[likely].sum() >= target:
            break
    likely = likely[logits_C[likely].argsort(descending=True, stable=True)]
    num_kept = int((weights_C[likely].cumsum(0) < target).sum()) + 1
    return likely[:num_kept].sort().values
