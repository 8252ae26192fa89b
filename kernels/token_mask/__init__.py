"""Rules out tokens by a bit mask over the vocabulary."""

from torch import Tensor

from octavo.kernels.dispatch import choose
from octavo.kernels.token_mask import cpu
from octavo.kernels.token_mask.bits import FORBIDDEN as FORBIDDEN
from octavo.kernels.token_mask.bits import pack_mask as pack_mask

_IMPLEMENTATIONS = {"cpu": cpu.mask_tokens}
"""Implementations by device type. On a GPU, `octavo.kernels.sample.sample_rows` does this for complete rows."""


def mask_tokens(logits_V: Tensor, allowed_W: Tensor) -> None:
    """Set, in place, the logits of tokens that are not allowed to `FORBIDDEN`; the others stay as they are.

    Args:
        logits_V: float32, one row.
        allowed_W: int32, ceil(V / 32) words: bit i % 32 of word i // 32 is set if token i is allowed. Bits
            beyond V are ignored.
    """
    choose("mask_tokens", _IMPLEMENTATIONS, logits_V.device)(logits_V, allowed_W)
