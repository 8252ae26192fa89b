"""Unpacks the bits, then one operation over the row."""

from torch import Tensor

from octavo.kernels.token_mask.bits import FORBIDDEN, unpack_mask


def mask_tokens(logits_V: Tensor, allowed_W: Tensor) -> None:
    """See the contract in the package."""
    logits_V.masked_fill_(~unpack_mask(allowed_W, logits_V.numel()), FORBIDDEN)
