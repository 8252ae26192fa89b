"""Cuts the attention of a step into the pieces that programs on a GPU compute. Pure: numpy, no GPU, no torch.

Requests with few rows are computed segment by segment of their keys, by as many programs as there are segments (a
decode of one long request would otherwise keep one program busy for each key head); the others tile by tile of their
rows. Which way a request takes does not show in its bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

SEGMENT = 256
"""Keys whose sums are taken together. Another number is another order of summation."""

_ALIGNMENT = 4
"""Words: lists begin at multiples of 16 bytes, whatever their lengths, so that kernels are compiled once."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much memory a plan and what it works with have.

    A request that goes beyond the items or partials is computed as a chunk, slower.
    """

    max_requests: int
    max_rows: int
    max_items: int
    """Segments of the requests with few rows."""
    max_partials: int
    """Sums of one row over one segment that wait to be added up; of requests with one segment there are none."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """How many neighbouring tokens of a request, with their query heads, one tile of a kernel holds."""

    of_chunk: int
    of_split: int
    """0: no request is split."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the lists of a plan lie in one array of int32, by the first word of each."""

    limits: Limits
    num_items: int
    query_starts: int
    context_lens: int
    first_items: int
    """Of each request that is split: its place in the list of items."""
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
        # Of each request the last tile may be cut short.
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
    """What a plan holds: which kernels are launched for it, and how large."""

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

    A request without rows and keys is none: what pads a batch to the size of a graph.

    Args:
        words: `layout.num_words` of them.
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
    """Return request and first row of each tile, those with the most keys first: the last to end shall be short."""
    tiles = -(-rows // tokens)
    requests = np.repeat(np.arange(len(lens)), tiles)
    indices = np.arange(len(requests)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    first_rows = starts[requests] + indices * tokens
    keys = lens[requests] - rows[requests] + np.minimum((indices + 1) * tokens, rows[requests])
    order = np.argsort(-keys, kind="stable")
    return requests[order], first_rows[order]
