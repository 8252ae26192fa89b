"""The meaning of the penalties: one token after another."""

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
    for row, token in torch.cartesian_prod(*(torch.arange(length) for length in logits_RV.shape)).tolist():
        logit, count = logits_RV[row, token], output_counts_RV[row, token]
        if count > 0 or is_in_prompt_RV[row, token]:
            logit = logit / repetition_R[row] if logit > 0 else logit * repetition_R[row]
        logit = logit - frequency_R[row] * count
        if count > 0:
            logit = logit - presence_R[row]
        logits_RV[row, token] = logit
