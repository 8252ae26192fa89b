"""The filters without sorting the vocabulary."""

import math

import torch
from torch import Tensor

from octavo.kernels.top_k import top_k as select_top_k


def filter_logits(logits_V: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """See the contract in the package."""
    ids = torch.arange(logits_V.numel())
    logits = logits_V
    if min_p > 0:
        ids = (logits >= logits.max() + math.log(min_p)).nonzero().squeeze(1)
        logits = logits[ids]
    if 0 < top_k < logits.numel():
        kept = select_top_k(logits, top_k).sort().values
        ids, logits = ids[kept], logits[kept]
    if top_p < 1:
        ids = ids[_nucleus(logits, top_p)]
    return ids


def _nucleus(logits_C: Tensor, top_p: float) -> Tensor:
    """Return the rising indices of the shortest list of probability `top_p`.

    Tokens above a threshold are a prefix of the sorted order. If their mass reaches `top_p`, the nucleus is among them,
    and only they need sorting. The first threshold is 1/256 of the largest probability; each further one is 256 times
    lower. The lowest useful threshold is (1 - top_p) / C: all tokens below it together weigh less than 1 - top_p. Half
    of that leaves room for rounding.
    """
    probs_C = torch.softmax(logits_C, 0)
    lowest = 0.5 * (1 - top_p) / probs_C.numel()
    threshold = float(probs_C.max())
    while True:
        threshold = max(threshold / 256, lowest)
        likely = (probs_C >= threshold).nonzero().squeeze(1)
        likely = likely[logits_C[likely].argsort(descending=True, stable=True)]
        mass = probs_C[likely].double().cumsum(0)
        if threshold <= lowest or not mass.numel() or mass[-1] >= top_p:
            num_kept = int((mass < top_p).sum()) + 1
            return likely[:num_kept].sort().values
