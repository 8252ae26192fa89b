"""The format of a token mask, and the logit of tokens that it rules out."""

from collections.abc import Iterable

import torch
from torch import Tensor

FORBIDDEN = -1e32
"""Below every other logit, and still finite at the lowest temperature, 0.01: differences of infinities are NaN."""


WORD_BITS = 32


def pack_mask(allowed: Iterable[int], vocab_size: int) -> Tensor:
    """Return the mask that allows only these tokens, each less than `vocab_size`."""
    bits = torch.zeros(-(-vocab_size // WORD_BITS), WORD_BITS, dtype=torch.int64)
    bits.view(-1)[torch.tensor(list(allowed), dtype=torch.int64)] = 1
    words_W = (bits << torch.arange(WORD_BITS)).sum(dim=1)
    return torch.where(words_W < 2**31, words_W, words_W - 2**32).int()


def unpack_mask(allowed_W: Tensor, vocab_size: int) -> Tensor:
    """Return a bool for each token, True if it is allowed."""
    bits = allowed_W.unsqueeze(1) >> torch.arange(WORD_BITS, dtype=torch.int32) & 1
    return bits.flatten()[:vocab_size].bool()
