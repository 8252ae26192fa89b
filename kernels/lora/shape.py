"""The sizes of the adapters of one linear layer, and one adapter's matrices for it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.dispatch import require


@dataclass(frozen=True, slots=True)
class LoraShape:
    """One linear layer and its slots."""

    num_inputs: int
    parts: tuple[int, ...]
    """Outputs of the layers of the checkpoint that are stacked into this one; each has an A and a B of its own."""
    num_slots: int
    max_rank: int
    """Of the adapter of one part."""
    dtype: torch.dtype
    """Of A and B, and of the rows."""
    is_table: bool = False
    """The layer is an embedding: its inputs are tokens, and A is looked up."""
    num_segments: int | None = None
    """Parts in which native products with A add up the inputs here; None: as many as are fast."""
    num_ranks: int = 1
    """Ranks that hold as many inputs each and gather the sums of their segments."""
    a_part: int = 0
    """Index of this worker among those that divide the rows of A."""
    num_a_parts: int = 1
    """Number of workers that divide the rows of A, in order and as evenly as `own_rank` says, and gather the sums."""
    num_experts: int = 1
    """Layers of these sizes that each adapter has matrices for: those of the experts here."""

    @property
    def num_entries(self) -> int:
        """Pairs of a slot and an expert: entry `slot * num_experts + expert`."""
        return self.num_slots * self.num_experts

    @property
    def own_rank(self) -> int:
        """Largest number of rows of A that this worker holds for each part, in the kernels of GPUs and torch."""
        return -(-self.max_rank // self.num_a_parts)

    def own_rows(self, a_RI: Tensor) -> Tensor:
        """Return the rows of an adapter's A that this worker holds. Empty if other workers hold all of them."""
        return a_RI[self.a_part * self.own_rank :][: self.own_rank]

    @property
    def num_outputs(self) -> int:
        """Of all parts."""
        return sum(self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of adapters of the largest rank in all slots."""
        elements = self.max_rank * self.num_outputs + self.own_rank * len(self.parts) * self.num_inputs
        return self.num_entries * elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class LoraPart:
    """The adapter of one part of a layer."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float

    @property
    def rank(self) -> int:
        """Rows of A."""
        return self.a_RI.shape[0]

    def check(self, shape: LoraShape, index: int) -> None:
        """Raise `ShapeError` unless the matrices fit part `index` of a layer."""
        rank = self.rank
        require(
            1 <= rank <= shape.max_rank
            and self.a_RI.shape == (rank, shape.num_inputs)
            and self.b_OR.shape == (shape.parts[index], rank),
            f"lora: A {tuple(self.a_RI.shape)} and B {tuple(self.b_OR.shape)} for {shape.num_inputs} inputs, "
            f"{shape.parts[index]} outputs and ranks up to {shape.max_rank}",
        )


def by_expert(parts: Sequence[LoraPart | None], shape: LoraShape) -> Iterator[Sequence[LoraPart | None]]:
    """Yield the parts of an adapter for each expert of a layer; a layer that has none counts as one."""
    count = len(shape.parts)
    require(len(parts) == count * shape.num_experts, f"lora: {len(parts)} parts for {shape.num_experts} times {count}")
    for first in range(0, len(parts), count):
        yield parts[first : first + count]
