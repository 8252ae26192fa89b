"""`RequestStream`: events of one request between the link, which puts them in, and the consumer, who takes them out."""

from collections.abc import Callable
from typing import Protocol

from octavo.protocol.errors import InvalidRequestError, OctavoError, OverloadedError, RequestFailedError
from octavo.protocol.events import Failed, FailureKind, Finished, RequestEvent, Tokens
from octavo.protocol.ids import RequestId

_FAILURES: dict[FailureKind, Callable[[Failed], OctavoError]] = {
    FailureKind.INVALID: lambda failed: InvalidRequestError(failed.message, failed.param),
    FailureKind.OVERLOADED: lambda failed: OverloadedError(failed.message, failed.param),
    FailureKind.INTERNAL: lambda failed: RequestFailedError(failed.message),
}


class Wakeable(Protocol):
    """What a consumer waits on: an `asyncio.Event` or the like."""

    def set(self) -> None:
        """Wake the consumer."""


class RequestStream:
    """Events of one request that its consumer has not taken yet.

    A slow consumer finds few large portions here instead of many small ones.
    """

    def __init__(self, request_id: RequestId, arrived: Wakeable) -> None:
        self.request_id = request_id
        self.is_over = False
        """True once the `Finished`, or the failure, has arrived."""
        self._events: list[Tokens | Finished] = []
        self._error: OctavoError | None = None
        self._arrived = arrived

    def put(self, event: RequestEvent) -> None:
        """Add an event and wake the consumer."""
        if isinstance(event, Failed):
            self.fail(_FAILURES[event.kind](event))
            return
        self._events.append(event)
        self.is_over = isinstance(event, Finished)
        self._arrived.set()

    def fail(self, error: OctavoError) -> None:
        """End the stream with an error, raised once what came before it has been taken."""
        self._error = error
        self.is_over = True
        self._arrived.set()

    def take(self) -> list[Tokens | Finished]:
        """Return everything that has arrived since the last call.

        Raises:
            OctavoError: how the request failed.
        """
        events, self._events = self._events, []
        if not events and self._error is not None:
            raise self._error
        if events and self._error is not None:
            self._arrived.set()  # come back for the error
        return events
