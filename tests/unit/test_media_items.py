"""Parts of a clip or a video as items that the engine encodes one by one."""

import numpy as np
import pytest

from octavo.frontend.media.items import media_items
from octavo.frontend.media.live_bytes import MAX_PROMPT_BUFFERS, LiveMedia
from octavo.frontend.media.wire import Result
from octavo.protocol.codec import MIN_BUFFER_BYTES
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.media import MediaItem, grids_of, media_fault

FRAMES = np.arange(5 * 4, dtype=np.float32)
RESULT = Result(
    num_rows=10,
    digest=bytes(32),
    tensors={"pixels": ("float32", [20, 1], FRAMES.tobytes()), "grid": ("int64", [5, 1], bytes(40))},
    grid=[5, 1, 2],
    frame_step=1.5,
    part_rows=[2] * 5,
)


def test_small_parts_share_an_item() -> None:
    items = media_items(RESULT, range(3, 13), "video", max_shared_rows=5, is_both_ways=False)
    assert [item.spans for item in items] == [[(3, 4)], [(7, 4)], [(11, 2)]]
    assert [item.grid for item in items] == [[2, 1, 2], [2, 1, 2], [1, 1, 2]]
    assert [item.continues_grid for item in items] == [False, True, True]
    assert [item.tensors["pixels"].shape for item in items] == [[8, 1], [8, 1], [4, 1]]
    assert b"".join(bytes(item.tensors["pixels"].data.data) for item in items) == FRAMES.tobytes()
    assert len({item.digest for item in items}) == 3
    assert media_fault(items, 13, {"video"}) is None
    (grid,) = grids_of(items)
    assert (grid.start, grid.grid, grid.frame_step) == (3, [5, 1, 2], 1.5)


def test_parts_with_text_between_them_are_grids_of_their_own() -> None:
    places = [place for frame in range(5) for place in (4 * frame, 4 * frame + 1)]
    items = media_items(RESULT, places, "video", max_shared_rows=4, is_both_ways=False)
    assert [len(item.spans) for item in items] == [2, 2, 1]
    assert not any(item.continues_grid for item in items)
    assert [grid.start for grid in grids_of(items)] == [0, 4, 8, 12, 16]


def test_a_whole_item_and_large_parts() -> None:
    (whole,) = media_items(RESULT, range(10), "video", max_shared_rows=10, is_both_ways=False)
    assert (whole.digest, whole.grid) == (RESULT.digest, RESULT.grid)
    assert len(media_items(RESULT, range(10), "video", max_shared_rows=1, is_both_ways=False)) == 5


def items_of_frames(num_frames: int) -> list[MediaItem]:
    """Return items with one frame of the smallest buffer, and one small tensor, each."""
    result = Result(
        num_rows=num_frames,
        digest=bytes(32),
        tensors={
            "pixels": ("uint8", [num_frames, MIN_BUFFER_BYTES], bytes(num_frames * MIN_BUFFER_BYTES)),
            "is_last": ("int64", [num_frames], bytes(8 * num_frames)),
        },
        part_rows=[1] * num_frames,
    )
    return media_items(result, range(num_frames), "video", max_shared_rows=1, is_both_ways=False)


def test_small_tensors_take_no_buffers_of_a_message() -> None:
    live = LiveMedia(2**30)
    live.hold_prompt(items_of_frames(MAX_PROMPT_BUFFERS - 1), "media")
    with pytest.raises(InvalidRequestError, match=r"take 242 buffers, .* is 240: .*--max-num-encoder-tokens"):
        live.hold_prompt(items_of_frames(MAX_PROMPT_BUFFERS + 1), "media")
