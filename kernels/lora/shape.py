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
    """Number of outputs of each checkpoint layer that is stacked into this one; each has its own A and B."""
    num_slots: int
    max_rank: int
    """Maximum rank of the adapter of one part."""
    dtype: torch.dtype
    """Data type of A, B and the rows."""
    is_table: bool = False
    """Whether the layer is an embedding: its inputs are tokens, and A is looked up."""
    num_segments: int | None = None
    """Number of segments of the inputs in native products with A; chosen for speed if `None`."""
    num_ranks: int = 1
    """Number of ranks that hold equally many inputs and gather the sums of their segments."""
    a_part: int = 0
    """Index of this worker among those that divide the rows of A."""
    num_a_parts: int = 1
    """Number of workers that divide the rows of A, in order and as evenly as `own_rank` says, and gather the sums."""
    num_experts: int = 1
    """Number of experts on this worker, each with a layer of these sizes."""

    @property
    def num_entries(self) -> int:
        """Number of pairs of a slot and an expert; the index of a pair's entry is `slot * num_experts + expert`."""
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
        """Number of outputs of all parts."""
        return sum(self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots, with adapters of the largest rank."""
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
        """Number of rows of A."""
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
    """Yield the parts of an adapter for each expert of a layer; a layer without experts counts as one expert."""
    count = len(shape.parts)
    require(len(parts) == count * shape.num_experts, f"lora: {len(parts)} parts for {shape.num_experts} times {count}")
    for first in range(0, len(parts), count):
        yield parts[first : first + count]
