"""Masks for the test of `mask_tokens`."""

import torch
from torch import Tensor

VOCAB_SIZES = [1, 7, 32, 33, 151, 2048, 2049]


def masks(vocab_size: int) -> list[Tensor]:
    """Return masks of all kinds: nothing, everything, one token, and words of any bits."""
    num_words = -(-vocab_size // 32)
    generator = torch.Generator().manual_seed(vocab_size)
    last = torch.zeros(num_words, dtype=torch.int32)
    last[-1] = -(2**31) if vocab_size % 32 == 0 else 1 << (vocab_size % 32 - 1)
    some = torch.randint(-(2**31), 2**31, (num_words,), generator=generator).int()
    mixed = torch.where(torch.rand(num_words, generator=generator) < 0.5, some, -(some % 2))
    return [torch.zeros_like(last), torch.full_like(last, -1), last, some, mixed.int()]
