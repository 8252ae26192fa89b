"""`media_items`: divides the processor's result for an item of a prompt into the `MediaItem`s that the engine
encodes.
"""

import hashlib
from collections.abc import Iterator, Sequence

from octavo.frontend.media.live_bytes import LiveBuffer
from octavo.frontend.media.wire import Result
from octavo.protocol.media import DIGEST_BYTES, Kind, MediaItem, MediaTensor
from octavo.protocol.prompt_embeds import Span

MAX_SHARED_ROWS = 512
"""Maximum number of rows of small parts that are encoded together. Fewer items need fewer buffers per message."""


def media_items(
    result: Result, places: Sequence[int], kind: Kind, *, max_shared_rows: int, is_both_ways: bool
) -> list[MediaItem]:
    """Return the `MediaItem`s of a result; each holds one or several of its parts.

    Args:
        result: result of an image, a video or an audio clip.
        places: positions of the prompt that hold the result's rows, in order.
        kind: kind of media.
        max_shared_rows: maximum number of rows of several parts in one item.
        is_both_ways: see `MediaItem`.
    """
    part_rows = result.part_rows or [result.num_rows]
    items, end = [], 0
    for first, last in _groups(part_rows, max_shared_rows):
        begin, end = end, end + sum(part_rows[first:last])
        item = MediaItem(
            _spans(places[begin:end]),
            result.digest if last - first == len(part_rows) else _digest_of_parts(result.digest, first, last),
            _tensors_of_parts(result, first, last),
            _share(result.grid, len(part_rows), last - first),
            is_both_ways=is_both_ways,
            kind=kind,
            frame_step=result.frame_step,
            continues_grid=bool(result.grid) and first > 0 and places[begin] == places[begin - 1] + 1,
        )
        items.append(item)
    return items


def _groups(part_rows: Sequence[int], max_shared_rows: int) -> Iterator[tuple[int, int]]:
    """Yield the index of the first part of each item, and the index after its last part."""
    first, num_rows = 0, 0
    for part, own in enumerate(part_rows):
        if part > first and num_rows + own > max_shared_rows:
            yield first, part
            first, num_rows = part, 0
        num_rows += own
    yield first, len(part_rows)


def _share(sizes: Sequence[int], num_parts: int, count: int) -> list[int]:
    """Return the shape of `count` of the `num_parts` equal parts into which the first axis is divided."""
    return [sizes[0] // num_parts * count, *sizes[1:]] if sizes else []


def _tensors_of_parts(result: Result, first: int, last: int) -> dict[str, MediaTensor]:
    num_parts = len(result.part_rows) or 1
    tensors = {}
    for name, (dtype, shape, data) in result.tensors.items():
        size = len(data) // num_parts
        own = data if last - first == num_parts else memoryview(data)[first * size : last * size]
        tensors[name] = MediaTensor(dtype, _share(shape, num_parts, last - first), LiveBuffer(own))
    return tensors


def _digest_of_parts(digest: bytes, first: int, last: int) -> bytes:
    return hashlib.blake2b(digest + first.to_bytes(4) + last.to_bytes(4), digest_size=DIGEST_BYTES).digest()


def _spans(places: Sequence[int]) -> list[Span]:
    """Return positions as spans of consecutive positions."""
    spans: list[Span] = []
    for place in places:
        if spans and sum(spans[-1]) == place:
            spans[-1] = (spans[-1][0], spans[-1][1] + 1)
        else:
            spans.append((place, 1))
    return spans
