"""`ModelLink`: sends requests to engines of one identity, so that the weights never change within a response."""

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
    """The engines that served when it was created, and all others of the same identity.

    Requests that were prepared for these engines go to them, even if other engines serve by then.
    """

    def __init__(self, routed: "RoutedLink", identity: str) -> None:
        self.identity = identity
        self.wake_queue = routed.wake_queue
        self._routed = routed
        # perf: called at least once per request.
        self.abort = routed.abort

    @property
    def facts(self) -> EngineFacts:
        """What these engines reported, with limits that hold for all of them."""
        return self._routed.facts_of(self.identity)

    @property
    def failure(self) -> EngineDeadError | None:
        """Why no engine serves any more. `None` while one may."""
        return self._routed.failure

    def send_vocabulary(self, vocabulary: ModelVocabulary) -> None:
        """See `CoreLink.send_vocabulary`."""
        self._routed.send_vocabulary(vocabulary)

    async def prefill(self, submit: Submit) -> KVTransfer | None:
        """Have a prefill engine compute a prompt, if there is one. See `prefill.prefill`."""
        return await prefill(self._routed, submit, self.identity) if self._routed.prefilling else None

    def submit(self, submit: Submit, arrived: WakeEvent, sibling: RequestId | None = None) -> RequestStream:
        """See `RoutedLink.submit`."""
        return self._routed.submit(submit, arrived, self.identity, sibling)
