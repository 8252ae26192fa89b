"""Defines `sample`: the references of its operations, one after another."""

import torch
from torch import Tensor

from octavo.kernels.filter_logits.reference import filter_logits
from octavo.kernels.gumbel_sample.reference import gumbel_sample
from octavo.kernels.penalties.reference import apply_penalties
from octavo.kernels.sample.cases import SamplingCase
from octavo.kernels.timestamp_mask.reference import mask_unlikely_text
from octavo.kernels.token_mask import pack_mask
from octavo.kernels.token_mask.reference import mask_tokens


def sample(logits_V: Tensor, request: SamplingCase, *, position: int, num_outputs: int) -> int:
    """Return the token drawn for one row's request; its logits must be finite."""
    logits_V = logits_V.clone()
    withholds = num_outputs < request.min_tokens and bool(request.withheld)
    for token_id, value in request.bias.items():
        logits_V[token_id] += value
    if withholds:
        logits_V[request.withheld] = -torch.inf
    if request.bad:
        logits_V[request.bad] = -torch.inf
    if request.seen:
        seen, counts = torch.tensor(list(request.seen)), torch.tensor(list(request.seen.values()))
        apply_penalties(logits_V, seen, counts, **request.penalties)
    has_mask = request.allowed is not None or request.first_timestamp > 0
    if request.bias or withholds or request.bad or request.seen or has_mask:
        logits_V = logits_V.clamp(-request.largest, request.largest)
    if request.allowed is not None:
        mask_tokens(logits_V, pack_mask(request.allowed, logits_V.numel()))
    if request.first_timestamp:
        mask_unlikely_text(logits_V, request.first_timestamp)
    if request.temperature == 0.0:
        return int((logits_V == logits_V.max()).nonzero()[0])
    logits_V = logits_V / request.temperature
    ids = filter_logits(logits_V, top_k=request.top_k, top_p=request.top_p, min_p=request.min_p)
    return gumbel_sample(logits_V[ids], ids, seed=request.seed, position=position)
