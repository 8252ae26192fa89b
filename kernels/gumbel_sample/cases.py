"""Rows for the test and the benchmark of `gumbel_sample`."""

import torch
from torch import Tensor

CASES: list[tuple[int, float]] = [(1, 1.0), (7, 1.0), (151, 0.0), (151, 3.0), (2049, 0.5), (2049, 300.0)]
"""(number of candidates, spread of the logits)."""

SEEDS = [0, 1, 42, 2**63, 2**64 - 1]


def row(num_candidates: int, spread: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return logits, and ascending token ids with gaps."""
    generator = torch.Generator().manual_seed(seed)
    logits_C = spread * torch.randn(num_candidates, generator=generator)
    token_ids_C = torch.randperm(3 * num_candidates, generator=generator)[:num_candidates].sort().values
    return logits_C, token_ids_C
