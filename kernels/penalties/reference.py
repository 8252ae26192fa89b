"""Defines the penalties, token by token."""

import torch
from torch import Tensor


def apply_penalties(
    logits_V: Tensor,
    seen_ids_S: Tensor,
    output_counts_S: Tensor,
    *,
    repetition: float,
    frequency: float,
    presence: float,
) -> None:
    """See the contract in the package."""
    repetition_1, frequency_1, presence_1 = torch.tensor([repetition, frequency, presence])
    for token, count in zip(seen_ids_S.tolist(), output_counts_S.tolist(), strict=True):
        logit = logits_V[token]
        logit = logit / repetition_1 if logit > 0 else logit * repetition_1
        logit = logit - frequency_1 * count
        if count > 0:
            logit = logit - presence_1
        logits_V[token] = logit
