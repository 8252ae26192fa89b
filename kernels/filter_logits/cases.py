"""Rows and settings for the test and the benchmark of the filters."""

import math

import torch
from torch import Tensor

from octavo.kernels.filter_logits.weights import REACHED, weights_of

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


def edges_of_nucleus(logits_V: Tensor) -> list[float]:
    """Return values of `top_p` at which a nucleus ends exactly, and the adjacent floats on both sides."""
    falling = logits_V.sort(descending=True).values
    sums = weights_of(falling, falling[0]).cumsum(0)
    places = sorted({0, 1, len(sums) // 3, len(sums) // 2, len(sums) - 2, len(sums) - 1} & set(range(len(sums))))
    exact = [int(sums[place]) / int(sums[-1]) / REACHED for place in places]
    near = [p for edge in exact for p in (math.nextafter(edge, 0.0), edge, math.nextafter(edge, 1.0))]
    return [p for p in near if 0.0 < p < 1.0]
