"""Rows for the test and the benchmark of `logprobs`."""

import torch
from torch import Tensor

CASES: list[tuple[int, int, int]] = [(7, 0, 0), (7, 6, 7), (151, 17, 5), (50_257, 40_000, 20)]
"""(vocabulary, token id, number of top tokens)."""

TOLERANCE = 1e-5


def row(vocab_size: int, seed: int = 0) -> Tensor:
    """Return logits with many ties."""
    logits = 4 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))
    return (logits * 8).round() / 8
