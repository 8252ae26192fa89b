"""Work lists of `paged_attention` on a GPU: every row and key exactly once, within the limits, and evenly divided."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.kernels.paged_attention import AttentionShape, gpu_plan
from octavo.kernels.paged_attention.gpu_plan import ENTRY_WORDS, ITEM_WORDS, SEGMENT, Counts, Grid, Layout, Limits
from octavo.kernels.paged_attention.gpu_prefixes import Prefixes, SegmentLabels

HEADS = 3
GRID = Grid(chunk_tokens=18, split_tokens=9, shared_tokens=4, group=2, num_kv_heads=HEADS, num_programs=7)


@dataclass
class Work:
    """What the kernels read in a plan."""

    words: np.ndarray
    layout: Layout
    counts: Counts
    entries: np.ndarray = field(init=False)
    items: np.ndarray = field(init=False)
    loads: Counter[int] = field(default_factory=Counter)
    """Segments of each program."""

    def __post_init__(self) -> None:
        self.entries = self._rows(self.layout.entries, self.counts.num_entries, ENTRY_WORDS)
        self.items = self._rows(self.layout.items, int(self.words[self.layout.num_items]), ITEM_WORDS)

    def _rows(self, start: int, count: int, width: int) -> np.ndarray:
        return self.words[start : start + count * width].reshape(count, width)

    def of_items(self) -> list[tuple[list[int], int, int]]:
        """Return the entries, first segment and end of each item."""
        found = []
        for index, (first, count, begin, end) in enumerate(self.items.tolist()):
            members = self.words[self.layout.members :][first : first + count].tolist()
            found.append((members, begin, end))
            for head in range(HEADS):
                self.loads[(index * HEADS + head) % GRID.num_programs] += end - begin
        return found

    def of_units(self) -> list[tuple[int, int, int, int, int]]:
        """Return program, entry, key head, first segment and end of each piece, as the kernel finds them."""
        found = []
        for program in range(GRID.num_programs):
            unit, end_unit = self.words[self.layout.program_units + program :][:2].tolist()
            entry = int(self.words[self.layout.program_entries + program])
            self.loads[program] += end_unit - unit
            while unit < end_unit:
                _, _, _, keys, first, first_unit, _, _ = self.entries[entry].tolist()
                num_own = -(-keys // SEGMENT) - first
                head, within = divmod(unit - first_unit, num_own)
                count = min(num_own - within, end_unit - unit)
                found.append((program, entry, head, first + within, first + within + count))
                unit += count
                entry += head == HEADS - 1 and within + count == num_own
        return found


def shape_of(window: int | None, *, is_chunked: bool = False) -> AttentionShape:
    return AttentionShape(2 * HEADS, HEADS, 64, 1.0, window=window, is_chunked=is_chunked)


def plan(requests: list[tuple[int, int]], shape: AttentionShape, max_partials: int | None, labels: np.ndarray) -> Work:
    """Return the plan of requests with (rows, keys before them)."""
    starts = np.cumsum([0, *(rows for rows, _ in requests)])
    lens = [rows + before for rows, before in requests]
    limits = gpu_plan.limits_of(GRID, starts, lens)
    if max_partials is not None:
        limits = Limits(limits.max_requests, limits.max_rows, max_partials)
    layout = Layout.of(limits, GRID)
    words = np.full(layout.num_words, -7, dtype=np.int32)
    counts = gpu_plan.write(words, layout, GRID, shape, starts, lens, Prefixes(labels, np.arange(len(requests))))
    words[counts.num_split_words : layout.query_starts] = -9  # is not copied
    return Work(words, layout, counts)


def labels_of(families: list[int], depth: int, nested: int) -> np.ndarray:
    """Return labels: a family shares `depth` segments, and neighbours in it `nested` more."""
    labels = np.arange(12 * len(families)).reshape(len(families), 12) + 10_000
    for row, family in enumerate(families):
        labels[row, :depth] = 100 * family + np.arange(depth)
        labels[row, depth : depth + nested] = 1000 * (family + 1) + 100 * (row // 2) + np.arange(nested)
    return labels


@given(
    requests=st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 20, 60]), st.integers(0, 2600)), max_size=14),
    window=st.none() | st.integers(1, 1500),
    is_chunked=st.booleans(),
    max_partials=st.none() | st.integers(0, 100),
    families=st.lists(st.integers(0, 2), min_size=14, max_size=14),
    depth=st.integers(0, 6),
    nested=st.integers(0, 3),
)
@example([(1, 2500)] * 9, None, False, None, [0] * 14, 5, 3)
def test_every_key_is_read_once_for_each_row(
    requests: list[tuple[int, int]],
    window: int | None,
    is_chunked: bool,
    max_partials: int | None,
    families: list[int],
    depth: int,
    nested: int,
) -> None:
    labels = labels_of(families, depth, nested)
    shape = shape_of(window, is_chunked=is_chunked)
    work = plan(requests, shape, max_partials, labels)
    seen: dict[tuple[int, int], list[int]] = {}
    pieces: Counter[tuple[int, int]] = Counter()
    for members, begin, end in work.of_items():
        requests_of = work.entries[members, 0]
        assert 2 <= len(members) <= GRID.shared_tokens or len(members) == 1
        assert (labels[requests_of, :end] == labels[requests_of[0], :end]).all()
        for entry in members:
            assert end * SEGMENT < work.entries[entry, 3], "its own row sees all of them"
            for head in range(HEADS):
                seen.setdefault((entry, head), []).extend(range(begin, end))
                pieces[entry, head] += 1
    for _, entry, head, begin, end in work.of_units():
        seen.setdefault((entry, head), []).extend(range(begin, end))
        pieces[entry, head] += 1

    starts = np.cumsum([0, *(rows for rows, _ in requests)])
    taken: list[int] = []
    for entry, (request, first_row, rows, keys, _, _, partial, place) in enumerate(work.entries.tolist()):
        assert (first_row, rows, keys) == (starts[request], requests[request][0], sum(requests[request]))
        first = shape.first_key(keys - rows) // SEGMENT
        end = -(-keys // SEGMENT)
        for head in range(HEADS):
            assert sorted(seen[entry, head]) == list(range(first, end))
            assert pieces[entry, head] == 1 or partial == first, "nobody would add up its sums"
        if partial >= 0:
            taken += range(place + first * rows, place + end * rows)
    assert len(set(taken)) == len(taken) and all(0 <= place < work.layout.limits.max_partials for place in taken)
    check_tiles(work, requests, starts)


def check_tiles(work: Work, requests: list[tuple[int, int]], starts: np.ndarray) -> None:
    layout, num_tiles = work.layout, work.counts.num_tiles
    tile_requests = work.words[layout.tile_requests : layout.tile_rows]
    tiles = tile_requests[:num_tiles].tolist()
    assert (tile_requests[num_tiles:] == -1).all()
    assert set(tiles) == {request for request, (rows, _) in enumerate(requests) if rows > GRID.split_tokens}
    for request in set(tiles):
        first_rows = work.words[layout.tile_rows :][:num_tiles][np.array(tiles) == request]
        assert sorted(first_rows) == list(range(starts[request], starts[request + 1], GRID.chunk_tokens))


@pytest.mark.parametrize("depth", [0, 8])
def test_programs_get_equal_shares(depth: int) -> None:
    work = plan([(1, 2500 + 20 * row) for row in range(10)], shape_of(None), None, labels_of([0] * 10, depth, 0))
    assert bool(work.of_items()) == (depth > 0)
    work.of_units()
    assert max(work.loads.values()) <= 1 + work.loads.total() / GRID.num_programs


def test_whole_requests_have_no_sums_in_memory() -> None:
    """7 programs for 7 x 3 heads."""
    work = plan([(1, 1000)] * 7, shape_of(None), None, labels_of([0] * 7, 0, 0))
    assert (work.entries[:, 6] == -1).all()
    assert [end - begin for *_, begin, end in work.of_units()] == [4] * 21


def test_little_is_shared_by_requests_with_many_keys_of_their_own() -> None:
    """Each would have to store the sums of all its segments."""
    grid_cost = 2 / 128  # of a sum of two heads
    segments = int(1 / (2 * grid_cost))
    for own, is_shared in ((segments // 2, True), (2 * segments, False)):
        labels = np.arange(2 * (own + 2)).reshape(2, own + 2) + 1
        labels[:, 0] = 0
        assert bool(len(plan([(1, (own + 1) * SEGMENT)] * 2, shape_of(None), None, labels).items)) == is_shared


def test_labels_tell_which_blocks_a_segment_has() -> None:
    labels = SegmentLabels(3, num_blocks=10, block_size=100, segment=256)
    labels.write(0, 0, [5, 6, 7])
    labels.write(1, 0, [5, 6])
    assert labels.labels_SX[:2, 0].tolist() == [1, 0], "its last block is missing"
    labels.write(1, 2, [7, 8, 9, 1])
    labels.write(0, 3, [8, 9, 1])
    assert labels.labels_SX[0, :2].tolist() == labels.labels_SX[1, :2].tolist() == [1, 2]
    labels.write(2, 0, [5, 4, 7])
    assert labels.labels_SX[2, 0] not in (0, 1)
    labels.write(2, 0, [5, 6, 7])
    assert labels.labels_SX[2, 0] == 1, "a slot has another request"
    whole = SegmentLabels.of(np.array([[1, 2], [1, 3]], dtype=np.int32), block_size=512, segment=256)
    assert whole.labels_SX.tolist() == [[1, 2, 3, 4], [1, 2, 5, 6]]


def test_tiles_with_the_most_keys_come_first() -> None:
    work = plan([(36, 3964), (100, 0)], shape_of(None), None, labels_of([0, 1], 0, 0))
    first_rows = work.words[work.layout.tile_rows :][: work.counts.num_tiles].tolist()
    assert first_rows == [18, 0, 126, 108, 90, 72, 54, 36]


def test_requests_that_pad_a_batch_are_no_work() -> None:
    layout = Layout.of(Limits(max_requests=4, max_rows=4, max_partials=9), GRID)
    words = np.zeros(layout.num_words, dtype=np.int32)
    counts = gpu_plan.write(words, layout, GRID, shape_of(None), [0, 1, 2, 2, 2], [600, 3, 0, 0])
    assert (counts.num_entries, counts.num_tiles) == (2, 0)
    assert words[layout.program_units : layout.program_entries].max() == HEADS * 4


def test_lists_begin_at_16_bytes() -> None:
    """A pointer that is aligned otherwise would have a kernel compiled for it."""
    layout = Layout.of(Limits(max_requests=5, max_rows=77, max_partials=0), GRID)
    places = [layout.program_units, layout.program_entries, layout.entries, layout.members, layout.items]
    places += [layout.query_starts, layout.context_lens, layout.tile_requests, layout.tile_rows]
    assert all(place % 4 == 0 for place in places)


def test_what_there_is_no_room_for_is_refused() -> None:
    layout = Layout.of(Limits(max_requests=1, max_rows=2, max_partials=0), GRID)
    words = np.zeros(layout.num_words, dtype=np.int32)
    with pytest.raises(ValueError, match="2 requests"):
        gpu_plan.write(words, layout, GRID, shape_of(None), [0, 1, 2], [1, 1])
    with pytest.raises(ValueError, match="3 rows"):
        gpu_plan.write(words, layout, GRID, shape_of(None), [0, 3], [3])
