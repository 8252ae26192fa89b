"""`RequestStream`: the queue of one request's events, from the link to the consumer."""

from collections.abc import Callable

from octavo.frontend.wake_event import WakeEvent
from octavo.protocol.errors import InvalidRequestError, OctavoError, OverloadedError, RequestFailedError
from octavo.protocol.events import Failed, FailureKind, Finished, RequestEvent, Tokens
from octavo.protocol.ids import RequestId

_FAILURES: dict[FailureKind, Callable[[Failed], OctavoError]] = {
    FailureKind.INVALID: lambda failed: InvalidRequestError(failed.message, failed.param),
    FailureKind.OVERLOADED: lambda failed: OverloadedError(failed.message, failed.param),
    FailureKind.INTERNAL: lambda failed: RequestFailedError(failed.message),
}


class RequestStream:
    """Events that the consumer has not taken yet. A slow consumer gets them in larger batches."""

    __slots__ = ("_arrived", "_error", "_events", "engine", "is_over", "request_id")

    def __init__(self, request_id: RequestId, arrived: WakeEvent, engine: int = 0) -> None:
        self.request_id = request_id
        self.engine = engine
        """Index of the engine that has the request now, or had it when it ended."""
        self.is_over = False
        """Whether the `Finished` event, or the failure, has arrived."""
        self._events: list[Tokens | Finished] = []
        self._error: OctavoError | None = None
        self._arrived = arrived

    def put(self, event: RequestEvent) -> None:
        """Add an event and wake the consumer."""
        if not isinstance(event, Tokens):  # perf: the most common type first
            if isinstance(event, Failed):
                self.fail(_FAILURES[event.kind](event))
                return
            self.is_over = True
        self._events.append(event)
        self._arrived.set()

    def fail(self, error: OctavoError) -> None:
        """End the stream with an error, which is raised once all earlier events are taken."""
        self._error = error
        self.is_over = True
        self._arrived.set()

    def take(self) -> list[Tokens | Finished]:
        """Return everything that has arrived since the last call.

        Raises:
            OctavoError: the request failed.
        """
        events, self._events = self._events, []
        if not events and self._error is not None:
            raise self._error
        if events and self._error is not None:
            self._arrived.set()  # wake the consumer again for the error
        return events
