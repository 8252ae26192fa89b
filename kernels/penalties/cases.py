"""Rows for the test and the benchmark of the penalties."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One call's arguments."""

    logits_V: Tensor
    seen_ids_S: Tensor
    output_counts_S: Tensor
    penalties: dict[str, float]


def case(vocab_size: int, num_seen: int, seed: int = 0) -> Case:
    """Return random logits and counts, with penalties of both signs."""
    generator = torch.Generator().manual_seed(seed)
    repetition, frequency, presence = torch.rand(3, generator=generator, dtype=torch.float64).tolist()
    return Case(
        logits_V=4 * torch.randn(vocab_size, generator=generator),
        seen_ids_S=torch.randperm(vocab_size, generator=generator)[:num_seen].int(),
        output_counts_S=torch.randint(-2, 4, (num_seen,), generator=generator).clamp(min=0).int(),
        penalties={
            "repetition": 0.5 + repetition,
            "frequency": 4 * frequency - 2,
            "presence": 4 * presence - 2,
        },
    )


SHAPES: list[tuple[int, int]] = [(7, 0), (7, 7), (151, 20), (1000, 300)]
"""(vocabulary, seen tokens)."""
