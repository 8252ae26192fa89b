"""Defines a token mask, token by token."""

from torch import Tensor

from octavo.kernels.token_mask.bits import FORBIDDEN


def mask_tokens(logits_V: Tensor, allowed_W: Tensor) -> None:
    """See the contract in the package."""
    words = allowed_W.tolist()
    for token in range(logits_V.numel()):
        if not words[token // 32] >> token % 32 & 1:
            logits_V[token] = FORBIDDEN
