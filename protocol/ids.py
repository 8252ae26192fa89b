"""Types of the integers and strings that are sent between processes, and the packed form of long lists of ids."""

import functools
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    IdArray: TypeAlias = array[int]
else:
    IdArray = array
"""Ids as 32-bit integers, 4 bytes each in memory and on the wire (`codec`). Never modify one that belongs to a
message."""

ID_BYTES = 4

RequestId: TypeAlias = str
"""Chosen by the frontend. Unique among the live requests of one core."""

TokenId: TypeAlias = int
"""Index into the vocabulary."""

BlockId: TypeAlias = int
"""Index of a KV block (page) in every layer's cache tensor."""

SlotId: TypeAlias = int
"""Row of a running request in the workers' persistent batch."""

Rank: TypeAlias = int
"""Number of a worker in its group, from 0. Rank 0 replies."""


def pack_ids(ids: Iterable[int] = ()) -> IdArray:
    """Return ids in their packed form.

    Raises:
        OverflowError: an id needs more than 31 bits.
        TypeError: an id is not an integer.
    """
    return array("i", ids)


def unpack_ids(data: "bytes | memoryview") -> IdArray:
    """Return ids from their little-endian bytes on the wire.

    Raises:
        ValueError: the length is not a multiple of `ID_BYTES`.
    """
    if len(data) % ID_BYTES:
        raise ValueError(f"packed ids take {ID_BYTES} bytes each, got {len(data)} bytes")
    ids = array("i")
    ids.frombytes(data)
    return ids


def are_below(ids: Sequence[int], limit: int) -> bool:
    """Return whether all ids are from 0 to `limit - 1`; `limit` is at most 2**31.

    perf: a loop over the ids of a prompt of 32,000 tokens, as in `max`, would block the step loop for a millisecond.
    Here one large integer holds many ids side by side. Adding `2**31 - limit` to each lane sets the sign bit of ids
    that are too large, without a carry into the next lane.
    """
    if not ids:
        return True  # an empty memoryview has no other shape
    signs, room = _lanes(2**31), _lanes(2**31 - limit)
    data = memoryview(pack_ids(ids)).cast("B")
    for start in range(0, len(data), _NUM_LANES * ID_BYTES):
        lanes = int.from_bytes(data[start : start + _NUM_LANES * ID_BYTES], "little")
        if (lanes | (lanes + room)) & signs:
            return False
    return True


_NUM_LANES = 1024


@functools.lru_cache(maxsize=8)
def _lanes(value: int) -> int:
    """Return an integer that holds a 32-bit value in every lane."""
    return int.from_bytes(value.to_bytes(ID_BYTES, "little") * _NUM_LANES, "little")
