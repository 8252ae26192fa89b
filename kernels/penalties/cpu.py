"""Elementwise torch operations over the seen tokens only, each rounded separately."""

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
    ids_S = seen_ids_S.long()
    logits_S = logits_V[ids_S]
    logits_S = torch.where(logits_S > 0, logits_S / repetition, logits_S * repetition)
    logits_S -= frequency * output_counts_S.float()
    logits_S -= presence * (output_counts_S > 0).float()
    logits_V[ids_S] = logits_S
