"""Cases of `lora`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.lora.shape import LoraPart, LoraShape

TOLERANCES = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Tolerances relative to the largest output. Between A and B the products are rounded to the dtype of the rows."""


@dataclass(frozen=True, slots=True)
class Case:
    """A layer, and the ranks of the adapters of its parts."""

    num_inputs: int
    parts: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    """Rank of each slot and part; 0: the adapter leaves the part unchanged."""

    def shape(self, dtype: torch.dtype, *, is_table: bool = False) -> LoraShape:
        """Return the layer with its slots."""
        max_rank = max(max(ranks) for ranks in self.ranks)
        return LoraShape(self.num_inputs, self.parts, len(self.ranks), max_rank, dtype, is_table)

    def adapters(self, dtype: torch.dtype, seed: int = 0) -> list[list[LoraPart | None]]:
        """Return random adapters for all slots."""
        noise = torch.Generator().manual_seed(seed)

        def random(*dims: int) -> Tensor:
            values: Tensor = torch.randn(*dims, generator=noise) * float(dims[-1]) ** -0.5
            return values.to(dtype)

        return [
            [
                LoraPart(random(rank, self.num_inputs), random(outputs, rank), 0.5 + index) if rank else None
                for index, (rank, outputs) in enumerate(zip(ranks, self.parts, strict=True))
            ]
            for ranks in self.ranks
        ]


CASES = [
    Case(64, (64,), ((8,), (16,), (1,))),
    Case(1100, (48, 16, 20), ((16, 16, 16), (5, 0, 33), (0, 8, 0))),
    Case(33, (130, 7), ((3, 64), (0, 0))),
    Case(40, (24,), ((512,), (320,))),
]
