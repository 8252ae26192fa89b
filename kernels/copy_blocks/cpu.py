"""`copy_blocks` on the CPU through torch."""

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_blocks(sources: Sequence[Tensor], destinations: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """See `octavo.kernels.copy_blocks.copy_blocks`."""
    source_N, destination_N = torch.tensor(pairs).T
    for source_PB, destination_PB in zip(sources, destinations, strict=True):
        destination_PB[destination_N] = source_PB[source_N]
