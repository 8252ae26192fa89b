"""Divides the attention of a step into work for the programs of a GPU. Pure: numpy, no GPU, no torch.

Requests with few rows are split into segments of keys; otherwise one program per key head would compute the decode of
one long request. A unit is a segment of a request for one key head. The units of a step form one sequence, in which the
segments of a key head are adjacent. Each program gets a contiguous range of it. Only heads at the ends of a range have
their segments in several programs, and so partial sums in memory.

Segments that several requests share are not in that sequence. They form items: a tile of requests and a span of
segments, whose keys are read once for the whole tile. Other requests are split into tiles of rows. The bits of a result
do not depend on the division.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from octavo.kernels.paged_attention.gpu_prefixes import MAX_LEVELS, Groups, Prefixes, find_groups, items_of
from octavo.kernels.paged_attention.shape import AttentionShape

Ints = npt.NDArray[np.int32]
Integers = Sequence[int] | npt.NDArray[np.integer]
Longs = npt.NDArray[np.int64]

SEGMENT = 256
"""Keys of a segment. The size determines the order of summation."""
ENTRY_WORDS, ITEM_WORDS = 8, 4
"""Words of an entry: request, first row, rows, keys, first segment that is not shared, first unit, first segment with
partial sums (-1: none), and where the partial sums of segment 0 would be. Words of an item: first member, number of
members, first segment, end of the segments."""

_ALIGNMENT = 4
"""Words to which lists are aligned: 16 bytes, so that kernels are compiled only once."""
_PARTIAL_COST = 1 / 128
"""Cost of writing and reading the partial sums of a query head over a segment, in units of reading its keys and values:
2 x 4 bytes compared with 256 x 2 x 2, for each dimension of the heads."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of a plan and its buffers."""

    max_requests: int
    max_rows: int
    max_partials: int
    """Maximum partial sums of one row over one segment. Requests for which there is no room are not split, which is
    slower but gives the same result."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The tiles of the kernels, and the number of programs of the split kernel."""

    chunk_tokens: int
    """Adjacent tokens of a request in a tile of the chunk kernel, with all their query heads."""
    split_tokens: int
    """The same for the split kernel. 0: no request is split."""
    shared_tokens: int
    """Requests with one token in a tile of the split kernel, for shared segments."""
    group: int
    """Query heads per key head."""
    num_kv_heads: int
    num_programs: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets of a plan's lists in one int32 array, in words."""

    limits: Limits
    num_items: int
    """Offset of the number of items (a single word)."""
    program_units: int
    """First unit of each program, and the end of the last."""
    program_entries: int
    """Entry of each program's first unit."""
    entries: int
    """The split requests."""
    members: int
    """Entries that share segments; those of an item are adjacent."""
    items: int
    query_starts: int
    context_lens: int
    tile_requests: int
    """Request of each tile; -1 after the last tile."""
    tile_rows: int
    """First row of each tile, in the step."""
    num_words: int

    @classmethod
    def of(cls, limits: Limits, grid: Grid) -> Self:
        """Lay out the lists for all plans within limits."""
        # The last tile of each request may be partial.
        max_tiles = limits.max_rows // grid.chunk_tokens + limits.max_requests
        lengths = [
            1,
            grid.num_programs + 1,
            grid.num_programs,
            ENTRY_WORDS * limits.max_requests,
            limits.max_requests,
            ITEM_WORDS * _max_items(limits, grid),
            limits.max_requests + 1,
            limits.max_requests,
            max_tiles,
            max_tiles,
        ]
        ends = np.cumsum([-(-length // _ALIGNMENT) * _ALIGNMENT for length in lengths]).tolist()
        return cls(limits, 0, *ends)


@dataclass(frozen=True, slots=True)
class Counts:
    """The sizes of a plan. They decide which kernels are launched, their grids, and what is copied to the device."""

    num_entries: int
    num_tiles: int
    num_split_words: int
    """Words that the split kernel reads, at the beginning; the lists of tiles come after them."""


def _max_items(limits: Limits, grid: Grid) -> int:
    """Return an upper bound on items. A level has less than one tile per request; spans add a few per program."""
    return MAX_LEVELS * limits.max_requests + 3 * grid.num_programs


def limits_of(grid: Grid, query_starts: Integers, context_lens: Integers) -> Limits:
    """Return limits that hold for the plan of this step, for any window."""
    starts, lens = np.asarray(query_starts, dtype=np.int64), np.asarray(context_lens, dtype=np.int64)
    rows, segments = np.diff(starts), -(-lens // SEGMENT)
    partials = np.where((rows <= grid.split_tokens) & (segments > 1), segments * rows, 0)
    return Limits(len(lens), int(starts[-1]), int(partials.sum()))


def write(  # long: the lists one after another, from the same arrays
    words: Ints,
    layout: Layout,
    grid: Grid,
    shape: AttentionShape,
    query_starts: Integers,
    context_lens: Integers,
    prefixes: Prefixes | None = None,
) -> Counts:
    """Write the plan of a step to `words`.

    Requests without rows and keys are padding, up to the size of a CUDA graph.

    Args:
        words: output, `layout.num_words` long.
        layout: offsets of the lists.
        grid: tiles and programs of the kernels.
        shape: attention of the model.
        query_starts: R + 1 offsets into the rows of the step.
        context_lens: R; keys of each request, including those of this step.
        prefixes: prefixes of the requests, without padding; nothing is shared if `None`.

    Raises:
        ValueError: there are more requests or rows than the layout has room for.
    """
    limits = layout.limits
    starts, lens = np.asarray(query_starts, dtype=np.int64), np.asarray(context_lens, dtype=np.int64)
    if len(lens) > limits.max_requests or starts[-1] > limits.max_rows:
        raise ValueError(f"{len(lens)} requests with {starts[-1]} rows for {limits}")
    rows = starts[1:] - starts[:-1]
    is_split = (rows > 0) & (rows <= grid.split_tokens)
    requests = is_split.nonzero()[0]
    segments = -(-lens[requests] // SEGMENT)
    firsts = _first_keys(shape, lens[requests] - rows[requests]) // SEGMENT
    shared = _Shared.nothing(len(requests))
    if prefixes is not None and shape.window is None and grid.shared_tokens > 1:
        # An entry that shares segments stores the sums of all its segments.
        has_room = (segments * rows[requests]).cumsum() <= limits.max_partials
        shareable = np.where(has_room & (rows[requests] == 1), (lens[requests] - 1) // SEGMENT, 0)
        groups = find_groups(
            prefixes.labels_SX, prefixes.slots_R[requests], shareable, segments, grid.group * _PARTIAL_COST
        )
        if groups is not None:
            shared = _Shared.of(groups, segments, grid)
    entries = np.empty((len(requests), ENTRY_WORDS), dtype=np.int32)
    entries[:, 0], entries[:, 1] = requests, starts[requests]
    entries[:, 2], entries[:, 3] = rows[requests], lens[requests]
    _divide(words, layout, grid, entries, firsts, segments, shared, limits.max_partials)
    words[layout.entries : layout.entries + entries.size] = entries.ravel()
    words[layout.num_items] = len(shared.items)
    num_words = layout.entries + entries.size
    if len(shared.items):
        words[layout.members : layout.members + len(shared.members)] = shared.members
        num_words = layout.items + shared.items.size
        words[layout.items : num_words] = shared.items.ravel()

    tile_requests, tile_rows = _tiles(starts, lens, np.where(is_split, 0, rows), grid.chunk_tokens)
    words[layout.query_starts : layout.query_starts + len(starts)] = starts
    words[layout.context_lens : layout.context_lens + len(lens)] = lens
    words[layout.tile_requests : layout.tile_requests + len(tile_requests)] = tile_requests
    words[layout.tile_requests + len(tile_requests) : layout.tile_rows] = -1
    words[layout.tile_rows : layout.tile_rows + len(tile_rows)] = tile_rows
    return Counts(len(requests), len(tile_requests), num_words)


def _first_keys(shape: AttentionShape, positions: Longs) -> Longs:
    """Return `shape.first_key` of each position."""
    if shape.window is None:
        return np.zeros_like(positions)
    if shape.is_chunked:
        return positions // shape.window * shape.window
    if not shape.is_causal:
        return np.maximum(positions - shape.window // 2, 0)
    return np.maximum(positions - shape.window + 1, 0)


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    """Data that the split requests of a step share. E: number of entries."""

    members: Longs
    """Indices of entries."""
    items: Ints
    """One row per item."""
    depths_E: Longs
    """Number of shared segments of each entry, counted from its first one."""

    @classmethod
    def nothing(cls, num_entries: int) -> Self:
        """Share nothing."""
        zeros = np.zeros(num_entries, np.int64)
        return cls(zeros[:0], np.empty((0, ITEM_WORDS), np.int32), zeros)

    @classmethod
    def of(cls, groups: Groups, segments_E: Longs, grid: Grid) -> Self:
        """Divide groups into items, of such a number of segments that all programs are busy."""
        num_tiles = -(-groups.num_members // grid.shared_tokens)
        units = int(num_tiles @ (groups.end_segments - groups.first_segments) + (segments_E - groups.depths_E).sum())
        span = max(1, _piece(units * grid.num_kv_heads, grid) // 2)
        return cls(groups.members, items_of(groups, span, grid.shared_tokens), groups.depths_E)


def _piece(num_units: int, grid: Grid) -> int:
    """Return the number of units of a program."""
    return -(-num_units // grid.num_programs)


def _divide(
    words: Ints,
    layout: Layout,
    grid: Grid,
    entries: Ints,
    firsts: Longs,
    segments: Longs,
    shared: _Shared,
    max_partials: int,
) -> None:
    """Divide the units that are not shared evenly between programs, and complete the entries."""
    heads, num_programs = grid.num_kv_heads, grid.num_programs
    own_firsts = np.maximum(firsts, shared.depths_E)
    num_own = segments - own_firsts
    ends = (heads * num_own).cumsum()
    num_units = int(ends[-1]) if len(ends) else 0
    first_units = ends - heads * num_own

    # A program that computes items gets fewer units.
    sizes = np.repeat(shared.items[:, 3] - shared.items[:, 2], heads)
    piece = _piece(num_units + int(sizes.sum()), grid)
    programs = np.arange(num_programs + 1)
    if len(sizes):
        loads = np.bincount(np.arange(len(sizes)) % num_programs, weights=sizes, minlength=num_programs)
        programs[1:] = np.maximum(piece - loads, 0).cumsum()
    else:
        programs *= piece
    begins = np.minimum(programs, num_units)

    # An entry whose segments are in several programs needs memory for sums.
    is_shared = shared.depths_E > 0
    num_partials = (segments - firsts) * entries[:, 2]
    room = max_partials - int(num_partials[is_shared].sum())
    is_divisible = is_shared | (np.where(is_shared, 0, num_partials).cumsum() <= room)
    num_partials = np.where(is_divisible, num_partials, 0)

    first_entries = ends.searchsorted(begins[:-1], side="right")
    has_units = first_entries < len(ends)
    found = first_entries[has_units]
    within = (begins[:-1][has_units] - first_units[found]) % num_own[found]
    begins[:-1][has_units] -= np.where(is_divisible[found], 0, within)
    is_cut = is_shared.copy()
    is_cut[found[(within > 0) & is_divisible[found]]] = True

    words[layout.program_units : layout.program_units + num_programs + 1] = begins
    words[layout.program_entries : layout.program_entries + num_programs] = np.where(has_units, first_entries, 0)
    entries[:, 4], entries[:, 5] = own_firsts, first_units
    entries[:, 6] = np.where(is_cut, firsts, -1)
    entries[:, 7] = num_partials.cumsum() - num_partials - firsts * entries[:, 2]


def _tiles(starts: Longs, lens: Longs, rows: Longs, tokens: int) -> tuple[Longs, Longs]:
    """Return request and first row of each tile. Tiles with the most keys come first, so that the last ones are
    short."""
    tiles = -(-rows // tokens)
    if not tiles.any():
        return tiles[:0], tiles[:0]
    requests = np.repeat(np.arange(len(lens)), tiles)
    indices = np.arange(len(requests)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    first_rows = starts[requests] + indices * tokens
    keys = lens[requests] - rows[requests] + np.minimum((indices + 1) * tokens, rows[requests])
    order = np.argsort(-keys, kind="stable")
    return requests[order], first_rows[order]
