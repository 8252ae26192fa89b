"""Elementwise torch operations, each rounded once, so that a row has the same bits in any batch."""

import torch
from torch import Tensor


def apply_penalties(
    logits_RV: Tensor,
    output_counts_RV: Tensor,
    is_in_prompt_RV: Tensor,
    *,
    repetition_R: Tensor,
    frequency_R: Tensor,
    presence_R: Tensor,
) -> None:
    """See the contract in the package."""
    is_output_RV = output_counts_RV > 0
    repetition_R1 = repetition_R.unsqueeze(1)
    repeated_RV = torch.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    torch.where(is_output_RV | is_in_prompt_RV, repeated_RV, logits_RV, out=logits_RV)
    logits_RV -= frequency_R.unsqueeze(1) * output_counts_RV
    logits_RV -= presence_R.unsqueeze(1) * is_output_RV
