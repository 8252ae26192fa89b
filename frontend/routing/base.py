"""The interface of a link to one or several engines, as those see it who submit requests."""

from typing import Protocol

from octavo.frontend.request_stream import RequestStream
from octavo.frontend.wake_event import WakeEvent, WakeQueue
from octavo.protocol.errors import EngineDeadError
from octavo.protocol.events import EngineFacts
from octavo.protocol.ids import RequestId
from octavo.protocol.requests import Submit


class RequestLink(Protocol):
    """`CoreLink` and `RoutedLink`."""

    wake_queue: WakeQueue

    @property
    def facts(self) -> EngineFacts:
        """What the engine reported about itself."""

    @property
    def failure(self) -> EngineDeadError | None:
        """Why no request can be served any more; None while the engine lives."""

    def submit(self, submit: Submit, arrived: WakeEvent) -> RequestStream:
        """See `CoreLink.submit`."""

    def abort(self, request_ids: list[RequestId]) -> None:
        """See `CoreLink.abort`."""
