"""Presence, frequency and repetition penalties."""

from torch import Tensor

from octavo.kernels.dispatch import choose
from octavo.kernels.penalties import cpu

_IMPLEMENTATIONS = {"cpu": cpu.apply_penalties}
"""Implementations by device type. On a GPU, `octavo.kernels.sample.sample_rows` does this for complete rows."""


def apply_penalties(
    logits_V: Tensor,
    seen_ids_S: Tensor,
    output_counts_S: Tensor,
    *,
    repetition: float,
    frequency: float,
    presence: float,
) -> None:
    """Lower, in place, the logits of tokens that were seen before; all others stay as they are.

    First the repetition penalty (Keskar et al. 2019, "CTRL"): a token of the prompt or the output has
    its logit divided by `repetition` if positive, multiplied by it if not. Then `frequency` times the
    number of times it was output, and `presence` if it was output at all, are subtracted.
    Computed in float32, each operation rounded on its own.

    Args:
        logits_V: float32, one row.
        seen_ids_S: integers; the tokens of prompt and output, each once.
        output_counts_S: int32, how often each of them was output; 0 if it is in the prompt alone.
        repetition: 1 has no effect.
        frequency: 0 has no effect.
        presence: 0 has no effect.
    """
    choose("apply_penalties", _IMPLEMENTATIONS, logits_V.device)(
        logits_V, seen_ids_S, output_counts_S, repetition=repetition, frequency=frequency, presence=presence
    )
