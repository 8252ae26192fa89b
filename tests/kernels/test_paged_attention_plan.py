"""Work lists of `paged_attention` on a GPU: every row and key exactly once, within the limits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.kernels.paged_attention import gpu_plan
from octavo.kernels.paged_attention.gpu_plan import SEGMENT, Layout, Limits, Tokens

TOKENS = Tokens(of_chunk=18, of_split=9)


@given(
    requests=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2000)), max_size=12),
    window=st.none() | st.integers(1, 1500),
    max_items=st.none() | st.integers(0, 40),
    max_partials=st.none() | st.integers(0, 100),
)
def test_every_row_is_computed_once(
    requests: list[tuple[int, int]], window: int | None, max_items: int | None, max_partials: int | None
) -> None:
    starts = np.cumsum([0, *(rows for rows, _ in requests)])
    lens = [rows + before for rows, before in requests]
    limits = gpu_plan.limits_of(TOKENS, starts, lens)
    is_limited = max_items is not None or max_partials is not None
    limits = Limits(
        limits.max_requests,
        limits.max_rows,
        limits.max_items if max_items is None else max_items,
        limits.max_partials if max_partials is None else max_partials,
    )
    layout = Layout.of(limits, TOKENS)
    words = np.full(layout.num_words, -7, dtype=np.int32)
    counts = gpu_plan.write(words, layout, TOKENS, window, starts, lens)

    assert words[layout.num_items] == counts.num_items <= limits.max_items
    items = words[layout.item_requests :][: counts.num_items].tolist()
    tile_requests = words[layout.tile_requests : layout.tile_rows]
    tiles = tile_requests[: counts.num_tiles].tolist()
    assert (tile_requests[counts.num_tiles :] == -1).all()
    assert set(items).isdisjoint(tiles) and set(items) | set(tiles) == set(range(len(lens)))
    ends = []
    for request, (rows, before) in enumerate(requests):
        first_segment = 0 if window is None else max(0, before - window + 1) // SEGMENT
        num_segments = -(-lens[request] // SEGMENT) - first_segment
        if request in items:
            assert rows <= TOKENS.of_split
            first = words[layout.first_items + request]
            assert items[first : first + num_segments] == [request] * num_segments == [request] * items.count(request)
            if num_segments > 1:
                begin = words[layout.first_partials + request]
                assert begin == (ends[-1] if ends else 0), "rows of sums that overlap, or are not used"
                ends.append(begin + num_segments * rows)
                assert ends[-1] <= limits.max_partials
        else:
            assert rows > TOKENS.of_split or is_limited
            first_rows = words[layout.tile_rows :][: counts.num_tiles][np.array(tiles) == request]
            assert sorted(first_rows) == list(range(starts[request], starts[request + 1], TOKENS.of_chunk))


def test_tiles_with_the_most_keys_come_first() -> None:
    starts, lens = [0, 36, 136], [4000, 100]
    layout = Layout.of(gpu_plan.limits_of(TOKENS, starts, lens), TOKENS)
    words = np.zeros(layout.num_words, dtype=np.int32)
    counts = gpu_plan.write(words, layout, TOKENS, None, starts, lens)
    first_rows = words[layout.tile_rows :][: counts.num_tiles].tolist()
    assert first_rows == [18, 0, 126, 108, 90, 72, 54, 36]


def test_requests_that_pad_a_batch_are_no_work() -> None:
    layout = Layout.of(Limits(max_requests=4, max_rows=4, max_items=9, max_partials=9), TOKENS)
    words = np.zeros(layout.num_words, dtype=np.int32)
    counts = gpu_plan.write(words, layout, TOKENS, None, range(5), [600, 3, 0, 0])
    assert (counts.num_items, counts.num_tiles) == (4, 0)
    assert words[layout.item_requests :][:4].tolist() == [0, 0, 0, 1]


def test_lists_begin_at_16_bytes() -> None:
    """A pointer that is aligned otherwise would have a kernel compiled for it."""
    layout = Layout.of(Limits(max_requests=5, max_rows=77, max_items=3, max_partials=0), TOKENS)
    places = [layout.query_starts, layout.context_lens, layout.first_items, layout.first_partials]
    assert all(place % 4 == 0 for place in [*places, layout.item_requests, layout.tile_requests, layout.tile_rows])


def test_what_there_is_no_room_for_is_refused() -> None:
    layout = Layout.of(Limits(max_requests=1, max_rows=2, max_items=1, max_partials=0), TOKENS)
    words = np.zeros(layout.num_words, dtype=np.int32)
    with pytest.raises(ValueError, match="2 requests"):
        gpu_plan.write(words, layout, TOKENS, None, [0, 1, 2], [1, 1])
    with pytest.raises(ValueError, match="3 rows"):
        gpu_plan.write(words, layout, TOKENS, None, [0, 3], [3])
