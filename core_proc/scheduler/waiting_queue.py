"""`WaitingQueue`: the waiting requests. Requests that have not started are stored packed; the first ones are
unpacked."""

from collections.abc import Callable, Iterator

from octavo.core_proc.queued_request import LiveRequest, QueuedRequest
from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.policy import OrderedRequests


class WaitingQueue:
    """Waiting requests, in order.

    Args:
        unpack: returns the `Request` that permanently replaces a packed one.
        has_adapters: whether requests are also indexed by adapter, for `heads`.
    """

    def __init__(self, unpack: Callable[[QueuedRequest], Request], *, has_adapters: bool = False) -> None:
        self._ordered = OrderedRequests[LiveRequest]()
        self._unpack = unpack
        self._has_adapters = has_adapters
        self._by_adapter: dict[str, OrderedRequests[LiveRequest]] = {}
        """Queues by adapter digest; "" holds requests without an adapter. Empty queues are removed."""

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._ordered)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all waiting requests."""
        return self._ordered.num_prompt_tokens

    @property
    def first(self) -> Request | None:
        """The request to serve first, unpacked."""
        head = self._ordered.first
        return None if head is None else self.unpacked(head)

    def heads(self) -> list[LiveRequest]:
        """Return the first request of each adapter, and the first one without an adapter."""
        return [head for queue in self._by_adapter.values() if (head := queue.first) is not None]

    def add(self, request: LiveRequest) -> None:
        """Insert a request at its place."""
        self._ordered.add(request)
        if self._has_adapters:
            self._by_adapter.setdefault(_adapter_key(request), OrderedRequests()).add(request)

    def remove(self, request: LiveRequest) -> None:
        """Remove a request from any position.

        Raises:
            KeyError: the request is not in this queue.
        """
        self._ordered.remove(request)
        if self._has_adapters:
            queue = self._by_adapter[key := _adapter_key(request)]
            queue.remove(request)
            if not len(queue):
                del self._by_adapter[key]

    def select(self, requests: list[LiveRequest]) -> "WaitingQueue":
        """Return a queue of some requests of this one, all unpacked."""
        selected = WaitingQueue(self._unpack, has_adapters=self._has_adapters)
        for request in requests:
            selected.add(self.unpacked(request))
        return selected

    def unpacked(self, request: LiveRequest) -> Request:
        """Unpack a request of this queue, replace the packed one by it, and return it."""
        if not isinstance(request, QueuedRequest):
            return request
        unpacked = self._unpack(request)
        self._ordered.replace(request, unpacked)
        if self._has_adapters:
            self._by_adapter[_adapter_key(request)].replace(request, unpacked)
        return unpacked


def _adapter_key(request: LiveRequest) -> str:
    return request.adapter.digest if request.adapter else ""
