"""The meaning of the penalties: one token after another."""

import numpy as np
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
    num_rows, vocab_size = logits_RV.shape
    for row in range(num_rows):
        repetition, frequency, presence = (
            np.float32(penalty[row].item()) for penalty in (repetition_R, frequency_R, presence_R)
        )
        for token in range(vocab_size):
            logit = np.float32(logits_RV[row, token].item())
            count = np.float32(output_counts_RV[row, token].item())
            if count or is_in_prompt_RV[row, token]:
                logit = logit / repetition if logit > 0 else logit * repetition
            logit = logit - frequency * count
            if count:
                logit = logit - presence
            logits_RV[row, token] = float(logit)
