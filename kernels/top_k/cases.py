"""Rows for the test and the benchmark of `top_k`."""

import torch
from torch import Tensor

CASES: list[tuple[int, int]] = [(1, 1), (7, 3), (151, 20), (151, 151), (151, 400), (50_257, 50), (50_257, 1)]
"""(values in the row, k)."""


def row(num_values: int, seed: int = 0) -> Tensor:
    """Return values of which many are equal: ties are what this operation is about."""
    values = torch.randn(num_values, generator=torch.Generator().manual_seed(seed))
    return (values * 4).round() / 4
