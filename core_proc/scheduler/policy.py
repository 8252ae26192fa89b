"""The order of requests, and queues sorted by it. The request with the lowest order is admitted first and preempted
last."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

from octavo.core_proc.queued_request import LiveRequest
from octavo.core_proc.request import Request
from octavo.protocol.config.engine import SchedulingPolicy

Live = TypeVar("Live", Request, LiveRequest)

_MAX_CHUNK = 512
"""Most requests in one chunk of a queue."""


AGING_REQUESTS = 10_000
"""How many places in the queue one level of priority is worth under the priority policy. At most this many later
requests per level can overtake a request, so low priorities do not starve."""


_MAX_ARRIVALS = 2**48


def order_of(policy: SchedulingPolicy, priority: int, arrival: int) -> int:
    """Return a request's unique order; `arrival` counts submissions."""
    if policy != "priority":
        return arrival
    return (priority * AGING_REQUESTS + arrival) * _MAX_ARRIVALS + arrival


class OrderedRequests(Generic[Live]):
    """Requests sorted by their order. A preempted request returns to its old place.

    perf: the requests are kept in sorted lists of at most `_MAX_CHUNK` each. So adding or removing one among 100,000
    moves only a few hundred pointers, at any position.
    """

    def __init__(self) -> None:
        self._chunks: list[list[Live]] = []
        self._orders: list[list[int]] = []
        """Orders of the requests, in lists of the same lengths."""
        self._firsts: list[int] = []
        """The lowest order of each list."""
        self._length = 0
        self.num_prompt_tokens = 0
        """Prompt tokens of all requests in the queue."""

    def __len__(self) -> int:
        return self._length

    def __contains__(self, request: Live) -> bool:
        at = bisect_right(self._firsts, request.order) - 1
        if at < 0:
            return False
        index = bisect_left(self._orders[at], request.order)
        return index < len(self._chunks[at]) and self._chunks[at][index] is request

    def __iter__(self) -> Iterator[Live]:
        for chunk in self._chunks:
            yield from chunk

    @property
    def first(self) -> Live | None:
        """The request to serve first."""
        return self._chunks[0][0] if self._chunks else None

    @property
    def last(self) -> Live | None:
        """The request to preempt first."""
        return self._chunks[-1][-1] if self._chunks else None

    def add(self, request: Live) -> None:
        """Insert a request at its place."""
        self._length += 1
        self.num_prompt_tokens += request.num_prompt_tokens
        if not self._chunks:
            self._insert_chunk(0, [request], [request.order])
            return
        at = max(0, bisect_right(self._firsts, request.order) - 1)
        chunk, orders = self._chunks[at], self._orders[at]
        index = bisect_left(orders, request.order)
        chunk.insert(index, request)
        orders.insert(index, request.order)
        self._firsts[at] = orders[0]
        if len(chunk) > _MAX_CHUNK:
            # A full last list is not split, because most requests are appended.
            half = _MAX_CHUNK if at == len(self._chunks) - 1 else _MAX_CHUNK // 2
            self._insert_chunk(at + 1, chunk[half:], orders[half:])
            del chunk[half:], orders[half:]

    def remove(self, request: Live) -> None:
        """Remove a request from any position.

        Raises:
            KeyError: the request is not in this queue.
        """
        at, index = self._find(request)
        self._length -= 1
        self.num_prompt_tokens -= request.num_prompt_tokens
        del self._chunks[at][index], self._orders[at][index]
        if not self._chunks[at]:
            del self._chunks[at], self._orders[at], self._firsts[at]
        elif index == 0:
            self._firsts[at] = self._orders[at][0]

    def replace(self, request: Live, successor: Live) -> None:
        """Replace a request of this queue by another object with the same order."""
        at, index = self._find(request)
        self._chunks[at][index] = successor

    def _find(self, request: Live) -> tuple[int, int]:
        """Return the index of the list that contains a request, and its index in that list."""
        at = bisect_right(self._firsts, request.order) - 1
        if at >= 0:
            index = bisect_left(self._orders[at], request.order)
            if index < len(self._chunks[at]) and self._chunks[at][index] is request:
                return at, index
        raise KeyError(request.request_id)

    def _insert_chunk(self, at: int, chunk: list[Live], orders: list[int]) -> None:
        self._chunks.insert(at, chunk)
        self._orders.insert(at, orders)
        self._firsts.insert(at, orders[0])
