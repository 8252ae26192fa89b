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

    Tokens above any threshold are a head of the whole order, so when their mass reaches `top_p` the nucleus
    lies among them and only they are sorted: first those not 256 times less likely than the likeliest,
    then 256 times more. No lower threshold is needed than (1 - top_p) / C, below which all tokens together
    weigh less than 1 - top_p; half of it leaves room for the rounding of the sums.
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
