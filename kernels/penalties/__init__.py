"""Presence, frequency and repetition penalties."""

from torch import Tensor

from octavo.kernels.dispatch import choose
from octavo.kernels.penalties import cpu

_IMPLEMENTATIONS = {"cpu": cpu.apply_penalties}


def apply_penalties(
    logits_RV: Tensor,
    output_counts_RV: Tensor,
    is_in_prompt_RV: Tensor,
    *,
    repetition_R: Tensor,
    frequency_R: Tensor,
    presence_R: Tensor,
) -> None:
    """Lower, in place, the logits of tokens that were seen before.

    First the repetition penalty (Keskar et al. 2019, "CTRL"): a token of the prompt or the output has
    its logit divided by `repetition` if positive, multiplied by it if not. Then `frequency` times the
    number of times it was output, and `presence` if it was output at all, are subtracted.
    Every row is computed without a look at the others.

    Args:
        logits_RV: float32.
        output_counts_RV: int32, how often each token was output.
        is_in_prompt_RV: bool.
        repetition_R: float32; 1 has no effect.
        frequency_R: float32; 0 has no effect.
        presence_R: float32; 0 has no effect.
    """
    choose("apply_penalties", _IMPLEMENTATIONS, logits_RV.device)(
        logits_RV,
        output_counts_RV,
        is_in_prompt_RV,
        repetition_R=repetition_R,
        frequency_R=frequency_R,
        presence_R=presence_R,
    )
