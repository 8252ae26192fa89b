"""Rules out text if a timestamp is likelier: the last rule of models that transcribe speech with timestamps."""

from torch import Tensor

from octavo.kernels.dispatch import choose
from octavo.kernels.timestamp_mask import cpu

_IMPLEMENTATIONS = {"cpu": cpu.mask_unlikely_text}


def mask_unlikely_text(logits_V: Tensor, first_timestamp: int) -> None:
    """Set, in place, the logits of text to `token_mask.FORBIDDEN` if all timestamps together are likelier than the
    likeliest text token.

    Args:
        logits_V: float32, one row; tokens that are ruled out already have the logit `FORBIDDEN`.
        first_timestamp: the first token that is a timestamp, from 1 to V - 1; those before it are text.
    """
    choose("mask_unlikely_text", _IMPLEMENTATIONS, logits_V.device)(logits_V, first_timestamp)
