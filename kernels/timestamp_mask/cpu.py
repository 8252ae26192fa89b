"""The sum of probabilities relative to that of the likeliest text token."""

from torch import Tensor

from octavo.kernels.token_mask.bits import FORBIDDEN


def mask_unlikely_text(logits_V: Tensor, first_timestamp: int) -> None:
    """See the contract in the package."""
    text_V, timestamps_V = logits_V[:first_timestamp], logits_V[first_timestamp:]
    if (timestamps_V - text_V.max()).exp().sum() > 1:
        text_V.fill_(FORBIDDEN)
