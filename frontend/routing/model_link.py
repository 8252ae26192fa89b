"""`ModelLink`: sends requests to the engines of one identity. An answer is never made by two kinds of weights."""

from typing import TYPE_CHECKING

from octavo.frontend.request_stream import RequestStream
from octavo.frontend.routing.prefill import prefill
from octavo.frontend.wake_event import WakeEvent
from octavo.protocol.errors import EngineDeadError
from octavo.protocol.events import EngineFacts
from octavo.protocol.ids import RequestId
from octavo.protocol.kv_transfer import KVTransfer
from octavo.protocol.requests import ModelVocabulary, Submit

if TYPE_CHECKING:
    from octavo.frontend.routing.routed_link import RoutedLink


class ModelLink:
    """The engines that served when it was made, and those that compute the same bits.

    Requests that are prepared for these engines go to them, also if others serve by then.
    """

    def __init__(self, routed: "RoutedLink", identity: str) -> None:
        self.identity = identity
        self.wake_queue = routed.wake_queue
        self._routed = routed
        # perf: called once or more for each request.
        self.abort = routed.abort

    @property
    def facts(self) -> EngineFacts:
        """What these engines reported, with the limits that hold for all."""
        return self._routed.facts_of(self.identity)

    @property
    def failure(self) -> EngineDeadError | None:
        """Why no engine serves any more; None while one may."""
        return self._routed.failure

    def send_vocabulary(self, vocabulary: ModelVocabulary) -> None:
        """See `CoreLink.send_vocabulary`."""
        self._routed.send_vocabulary(vocabulary)

    async def prefill(self, submit: Submit) -> KVTransfer | None:
        """Have an engine for prefills compute a prompt, if there is one. See `prefill.prefill`."""
        return await prefill(self._routed, submit, self.identity) if self._routed.prefilling else None

    def submit(self, submit: Submit, arrived: WakeEvent, beside: RequestId | None = None) -> RequestStream:
        """See `RoutedLink.submit`."""
        return self._routed.submit(submit, arrived, self.identity, beside)
