"""Copies blocks of a cache, to other blocks or to host memory and back.

A cache is a list of buffers divided into blocks, each with the keys or values of one layer. All buffers are copied
alike, so the operation knows neither layers nor dtypes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.copy_blocks import cpu
from octavo.kernels.dispatch import choose, lazy, require

WORD_BYTES = 8
"""A GPU copies complete words of this size."""


def copy_blocks(sources: Sequence[Tensor], destinations: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks from each source to the destination with the same index.

    No destination block may occur twice, or be the source of another pair.

    Args:
        sources: bytes_PB, uint8, with contiguous rows; all on one device, or in host memory that the device can read.
        destinations: bytes_PB of the same widths, likewise. At least one side is on the device that copies.
        pairs: source and destination block.

    Raises:
        ShapeError: the shapes or types do not match.
        UnsupportedDevice: no implementation for the device.
    """
    if not sources or not pairs:
        return
    require(
        all(map(_is_bytes, (*sources, *destinations)))
        and [each.shape[1] for each in sources] == [each.shape[1] for each in destinations],
        f"copy_blocks: buffers of {[tuple(each.shape) for each in sources]} to those of "
        f"{[tuple(each.shape) for each in destinations]}",
    )
    first, other = sources[0].device, destinations[0].device
    implementations = {"cpu": cpu.copy_blocks, "cuda": lazy("octavo.kernels.copy_blocks.gpu", copy_blocks)}
    run = choose("copy_blocks", implementations, other if first.type == "cpu" else first)
    run(sources, destinations, pairs)


def parts_of(host_PB: Tensor, cache: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the parts of blocks in host memory, one for each buffer of a cache."""
    return list(host_PB.split([buffer.shape[1] for buffer in cache], dim=1))


def _is_bytes(buffer: Tensor) -> bool:
    return buffer.ndim == 2 and buffer.dtype == torch.uint8 and buffer.stride(1) == 1
