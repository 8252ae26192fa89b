"""Defines when text is ruled out, with probabilities in float64."""

from torch import Tensor

from octavo.kernels.token_mask.bits import FORBIDDEN


def mask_unlikely_text(logits_V: Tensor, first_timestamp: int) -> None:
    """See the contract in the package."""
    probabilities_V = logits_V.double().softmax(dim=0)
    if probabilities_V[first_timestamp:].sum() > probabilities_V[:first_timestamp].max():
        logits_V[:first_timestamp] = FORBIDDEN
