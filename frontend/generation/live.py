"""`LiveRequests`: the running and waiting requests of one client, and their observer."""

from typing import Protocol

from octavo.frontend.metrics.observer import Observer


class Abortable(Protocol):
    """A request that is running or waiting."""

    request_id: str

    @property
    def identity(self) -> str:
        """Identity of the engines for which the request was prepared."""

    def abort(self) -> None:
        """End the request with the finish reason "abort"."""


class LiveRequests:
    """The live requests of a client, each from its start to its end."""

    def __init__(self) -> None:
        self.observer: Observer | None = None
        """Receives latencies and finished requests, for the metrics."""
        self._requests: set[Abortable] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def has_users(self, identity: str) -> bool:
        """Return whether there is a live request that was prepared for engines of this identity."""
        return any(request.identity == identity for request in self._requests)

    def add(self, request: Abortable) -> None:
        """Register a request, so that `abort` can find it."""
        self._requests.add(request)
        self._report()

    def discard(self, request: Abortable) -> None:
        """Remove a request that has ended."""
        self._requests.discard(request)
        self._report()

    def abort(self, request_id: str) -> bool:
        """Abort all requests with this id; return False if there is none."""
        found = [request for request in self._requests if request.request_id == request_id]
        for request in found:
            request.abort()
        return bool(found)

    def abort_all(self) -> None:
        """Abort every request."""
        for request in self._requests:
            request.abort()

    def _report(self) -> None:
        if self.observer:
            self.observer.on_live_requests(len(self._requests))
