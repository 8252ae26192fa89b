"""Reference of `copy_blocks`."""

from collections.abc import Sequence

from torch import Tensor


def copy_blocks(sources: Sequence[Tensor], destinations: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """See `octavo.kernels.copy_blocks.copy_blocks`."""
    for source_PB, destination_PB in zip(sources, destinations, strict=True):
        for source, destination in pairs:
            destination_PB[destination] = source_PB[source]
