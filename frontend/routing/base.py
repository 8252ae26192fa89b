"""The interface of a link to engines, for code that submits requests."""

from typing import Protocol

from octavo.frontend.request_stream import RequestStream
from octavo.frontend.wake_event import WakeEvent, WakeQueue
from octavo.protocol.errors import EngineDeadError
from octavo.protocol.events import EngineFacts
from octavo.protocol.ids import RequestId
from octavo.protocol.kv_transfer import KVTransfer
from octavo.protocol.requests import Submit


class RequestLink(Protocol):
    """Implemented by `ModelLink`, and by replacements in tests."""

    wake_queue: WakeQueue

    @property
    def identity(self) -> str:
        """Identity of the engines that get the requests: all of them compute the same bits."""

    @property
    def facts(self) -> EngineFacts:
        """What the engine reported about itself."""

    @property
    def failure(self) -> EngineDeadError | None:
        """Why no request can be served any more. `None` while an engine lives."""

    def submit(self, submit: Submit, arrived: WakeEvent, sibling: RequestId | None = None) -> RequestStream:
        """See `RoutedLink.submit`."""

    def abort(self, request_ids: list[RequestId]) -> None:
        """See `CoreLink.abort`."""


class PrefillingLink(RequestLink, Protocol):
    """A link to engines, some of which may only compute prompts."""

    async def prefill(self, submit: Submit) -> KVTransfer | None:
        """See `ModelLink.prefill`."""
