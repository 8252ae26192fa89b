"""`PendingAborts`: aborts a bounded number of requests per loop iteration."""

from collections.abc import Callable
from itertools import islice

from octavo.protocol.ids import RequestId

MAX_ABORTS_AT_ONCE = 256
"""Most requests aborted per loop iteration, so that losing a frontend with many requests does not delay steps."""


class PendingAborts:
    """Requests to be aborted. Requests beyond the limit of an iteration wait for later iterations.

    Args:
        end: aborts requests of a frontend now.
    """

    def __init__(self, end: Callable[[bytes, list[RequestId]], None]) -> None:
        self._end = end
        self._waiting: dict[bytes, dict[RequestId, None]] = {}
        """Waiting request ids by client."""
        self._num_left = 0
        """Number of requests that this iteration may still abort."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def begin_iteration(self) -> None:
        """Reset the limit for a new iteration."""
        self._num_left = MAX_ABORTS_AT_ONCE

    def add(self, client: bytes, request_ids: list[RequestId]) -> None:
        """Abort requests up to the limit of this iteration. Later iterations abort the rest."""
        if not self._waiting and len(request_ids) <= self._num_left:
            self._num_left -= len(request_ids)
            self._end(client, request_ids)
        else:
            self._waiting.setdefault(client, {}).update(dict.fromkeys(request_ids))

    def proceed(self) -> None:
        """Abort waiting requests up to the limit of this iteration."""
        while self._waiting and self._num_left:
            client, waiting = next(iter(self._waiting.items()))
            request_ids = list(islice(waiting, self._num_left))
            self._num_left -= len(request_ids)
            self.finish(client, request_ids)

    def finish(self, client: bytes, request_ids: list[RequestId]) -> None:
        """Abort requests now, regardless of the limit."""
        if waiting := self._waiting.get(client):
            for request_id in request_ids:
                waiting.pop(request_id, None)
            if not waiting:
                del self._waiting[client]
        self._end(client, request_ids)

    def is_waiting(self, client: bytes, request_id: RequestId) -> bool:
        """Return whether a request is waiting to be aborted."""
        return request_id in self._waiting.get(client, ())
