"""Batches for the test and the benchmark of the penalties."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One call's arguments."""

    logits_RV: Tensor
    output_counts_RV: Tensor
    is_in_prompt_RV: Tensor
    penalties: dict[str, Tensor]


def case(num_rows: int, vocab_size: int, seed: int = 0) -> Case:
    """Return random logits and counts, with penalties of both signs."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, vocab_size)
    counts = torch.randint(-6, 4, shape, generator=generator).clamp(min=0)
    return Case(
        logits_RV=4 * torch.randn(shape, generator=generator),
        output_counts_RV=counts.int(),
        is_in_prompt_RV=torch.rand(shape, generator=generator) < 0.2,
        penalties={
            "repetition_R": 0.5 + torch.rand(num_rows, generator=generator),
            "frequency_R": 4 * torch.rand(num_rows, generator=generator) - 2,
            "presence_R": 4 * torch.rand(num_rows, generator=generator) - 2,
        },
    )


SHAPES: list[tuple[int, int]] = [(1, 7), (3, 151), (5, 64)]
"""(rows, vocabulary) small enough for the reference's Python loop."""
