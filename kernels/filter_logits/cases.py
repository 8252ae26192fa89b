"""Rows and settings for the test and the benchmark of the filters."""

import torch
from torch import Tensor

SETTINGS: list[tuple[int, float, float]] = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (5, 1.0, 0.0),
    (1000, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 0.1, 0.0),
    (0, 0.999, 0.0),
    (0, 1e-6, 0.0),
    (0, 1.0, 0.05),
    (0, 1.0, 1.0),
    (20, 0.8, 0.02),
    (50, 0.95, 0.0),
]
"""(top_k, top_p, min_p)."""

VOCAB_SIZES = [1, 7, 151, 50_257]


def row(vocab_size: int, spread: float, seed: int = 0) -> Tensor:
    """Return logits; a large `spread` makes a few tokens likely, 0 makes all equal."""
    return spread * torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))
