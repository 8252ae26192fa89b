"""Divides the attention of a step into work for the programs of a GPU. Pure: numpy, no GPU, no torch.

Requests with few rows are split into segments of keys, one per program; otherwise the decode of one long request would
be computed by one program per key head. Other requests are split into tiles of rows. The bits of a result are the same
either way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

SEGMENT = 256
"""Keys of a segment. The number determines the order of summation."""

_ALIGNMENT = 4
"""Words. All lists are aligned to 16 bytes, so that kernels are compiled once."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of a plan and its buffers.

    A request that exceeds the items or partials is computed as a chunk, which is slower.
    """

    max_requests: int
    max_rows: int
    max_items: int
    """Segments of the requests with few rows."""
    max_partials: int
    """Partial sums of one row over one segment. A request with one segment has none."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """How many adjacent tokens of a request, with their query heads, a tile of each kernel holds."""

    of_chunk: int
    of_split: int
    """0: no request is split."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets of a plan's lists in one array of int32, in words."""

    limits: Limits
    num_items: int
    query_starts: int
    context_lens: int
    first_items: int
    """For each split request, the index of its first item."""
    first_partials: int
    item_requests: int
    tile_requests: int
    """-1 after the last tile."""
    tile_rows: int
    """The first row of each tile, in the step."""
    num_words: int

    @classmethod
    def of(cls, limits: Limits, tokens: Tokens) -> Self:
        """Lay out the lists of all plans within limits."""
        # The last tile of each request may be partial.
        max_tiles = limits.max_rows // tokens.of_chunk + limits.max_requests
        lengths = [
            1,
            limits.max_requests + 1,
            limits.max_requests,
            limits.max_requests,
            limits.max_requests,
            limits.max_items,
            max_tiles,
            max_tiles,
        ]
        ends = np.cumsum([-(-length // _ALIGNMENT) * _ALIGNMENT for length in lengths]).tolist()
        return cls(limits, 0, *ends)


@dataclass(frozen=True, slots=True)
class Counts:
    """The sizes of a plan, which decide the kernels to launch and their grids."""

    num_items: int
    num_tiles: int


def limits_of(
    tokens: Tokens,
    query_starts: Sequence[int] | npt.NDArray[np.integer],
    context_lens: Sequence[int] | npt.NDArray[np.integer],
) -> Limits:
    """Return limits that a plan of this step keeps to, whatever the window."""
    starts, lens = np.asarray(query_starts, dtype=np.int64), np.asarray(context_lens, dtype=np.int64)
    rows, segments = np.diff(starts), -(-lens // SEGMENT)
    items = np.where(rows <= tokens.of_split, segments, 0)
    partials = np.where(segments > 1, items * rows, 0)
    return Limits(len(lens), int(starts[-1]), int(items.sum()), int(partials.sum()))


def write(
    words: Ints,
    layout: Layout,
    tokens: Tokens,
    window: int | None,
    query_starts: Sequence[int] | npt.NDArray[np.integer],
    context_lens: Sequence[int] | npt.NDArray[np.integer],
) -> Counts:
    """Write the plan of a step to `words`.

    Requests without rows and keys are padding, up to the size of a graph.

    Args:
        words: `layout.num_words` long.
        layout: where the lists go.
        tokens: of the tiles.
        window: see `AttentionShape`.
        query_starts: R + 1 offsets into the rows of the step.
        context_lens: R; keys of each request, those of this step included.

    Raises:
        ValueError: more requests or rows than the layout has room for.
    """
    limits = layout.limits
    starts, lens = np.asarray(query_starts, dtype=np.int64), np.asarray(context_lens, dtype=np.int64)
    if len(lens) > limits.max_requests or starts[-1] > limits.max_rows:
        raise ValueError(f"{len(lens)} requests with {starts[-1]} rows for {limits}")
    rows = np.diff(starts)
    first_keys = np.zeros_like(lens) if window is None else np.maximum(lens - rows - window + 1, 0)
    segments = -(-lens // SEGMENT) - first_keys // SEGMENT
    partials = np.where(segments > 1, segments * rows, 0)
    is_split = rows <= tokens.of_split
    is_split &= np.cumsum(np.where(is_split, partials, 0)) <= limits.max_partials
    is_split &= np.cumsum(np.where(is_split, segments, 0)) <= limits.max_items

    items, split_partials = np.where(is_split, segments, 0), np.where(is_split, partials, 0)
    item_requests = np.repeat(np.arange(len(lens)), items)
    tile_requests, tile_rows = _tiles(starts, lens, np.where(is_split, 0, rows), tokens.of_chunk)
    for place, values in (
        (layout.num_items, [len(item_requests)]),
        (layout.query_starts, starts),
        (layout.context_lens, lens),
        (layout.first_items, np.cumsum(items) - items),
        (layout.first_partials, np.cumsum(split_partials) - split_partials),
        (layout.item_requests, item_requests),
        (layout.tile_requests, tile_requests),
        (layout.tile_rows, tile_rows),
    ):
        words[place : place + len(values)] = values
    words[layout.tile_requests + len(tile_requests) : layout.tile_rows] = -1
    return Counts(len(item_requests), len(tile_requests))


def _tiles(
    starts: npt.NDArray[np.int64], lens: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], tokens: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return request and first row of each tile, those with the most keys first, so that the last ones are short."""
    tiles = -(-rows // tokens)
    requests = np.repeat(np.arange(len(lens)), tiles)
    indices = np.arange(len(requests)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    first_rows = starts[requests] + indices * tokens
    keys = lens[requests] - rows[requests] + np.minimum((indices + 1) * tokens, rows[requests])
    order = np.argsort(-keys, kind="stable")
    return requests[order], first_rows[order]
