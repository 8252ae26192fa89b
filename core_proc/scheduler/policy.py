"""Who goes first: the order of requests, and the queue of those that wait.

One number pair per request decides everything: the least is admitted first and preempted last.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from octavo.core_proc.request import Request
from octavo.protocol.config.engine import SchedulingPolicy


def order_of(policy: SchedulingPolicy, priority: int, arrival: int) -> tuple[int, int]:
    """Return a request's place among all; `arrival` counts submissions and makes it unique."""
    return (priority if policy == "priority" else 0, arrival)


class OrderedRequests:
    """Requests sorted by their order. A preempted one thereby returns to where it stood."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.num_prompt_tokens = 0
        """Of all of them together."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def first(self) -> Request | None:
        """The one to serve first."""
        return self._requests[0] if self._requests else None

    @property
    def last(self) -> Request | None:
        """The one to preempt first."""
        return self._requests[-1] if self._requests else None

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        insort(self._requests, request, key=_order)
        self.num_prompt_tokens += request.num_prompt_tokens

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        index = bisect_left(self._requests, request.order, key=_order)
        if index == len(self._requests) or self._requests[index] is not request:
            raise KeyError(request.request_id)
        del self._requests[index]
        self.num_prompt_tokens -= request.num_prompt_tokens


def _order(request: Request) -> tuple[int, int]:
    return request.order
