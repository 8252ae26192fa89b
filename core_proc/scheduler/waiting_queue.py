"""`WaitingQueue`: the requests that wait. Those that have not started are packed; the first ones are unpacked."""

from collections.abc import Callable, Iterator

from octavo.core_proc.queued_request import LiveRequest, QueuedRequest
from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.policy import OrderedRequests


class WaitingQueue:
    """Waiting requests, in order.

    Args:
        unpack: makes the `Request` that replaces a packed one for good.
    """

    def __init__(self, unpack: Callable[[QueuedRequest], Request]) -> None:
        self._ordered = OrderedRequests[LiveRequest]()
        self._unpack = unpack

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._ordered)

    @property
    def num_prompt_tokens(self) -> int:
        """Of all of them together."""
        return self._ordered.num_prompt_tokens

    @property
    def first(self) -> Request | None:
        """The one to serve first, unpacked."""
        head = self._ordered.first
        return None if head is None else self._unpacked(head)

    def after(self, request: Request) -> Request | None:
        """Return the one that follows a request of this queue, unpacked; None after the last."""
        follower = self._ordered.after(request)
        return None if follower is None else self._unpacked(follower)

    def add(self, request: LiveRequest) -> None:
        """Put a request in its place."""
        self._ordered.add(request)

    def remove(self, request: LiveRequest) -> None:
        """Take a request out, wherever it stands.

        Raises:
            KeyError: it is not in this queue.
        """
        self._ordered.remove(request)

    def select(self, requests: list[LiveRequest]) -> "WaitingQueue":
        """Return a queue of some requests of this one, all unpacked."""
        selected = WaitingQueue(self._unpack)
        for request in requests:
            selected.add(self._unpacked(request))
        return selected

    def _unpacked(self, request: LiveRequest) -> Request:
        if not isinstance(request, QueuedRequest):
            return request
        unpacked = self._unpack(request)
        self._ordered.replace(request, unpacked)
        return unpacked
