"""`Gate`: where requests come in: at once, as long as none is suspected of killing cores.

A suspect is not even looked at before its trial; while one is under way nobody else comes in. Who may is decided in
`blame.py`. Plans nothing, and sends nothing.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence

from octavo.core_proc.recovery.black_box import NAME_BYTES
from octavo.core_proc.recovery.blame import Blame
from octavo.core_proc.request import RequestKey
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.protocol.events import Failed, FailureKind, Finished, FinishReason, Tokens
from octavo.protocol.ids import RequestId
from octavo.protocol.requests import Submit

logger = logging.getLogger(__name__)


class Gate:
    """Every request that has come and was not handed on, and a note of those that were.

    Args:
        blame: knows who may come in, and is told who has.
        take_in: hands a request on.
        is_live: whether a request that was handed on is not over.
        max_num_held: new requests that may wait here; 0: no limit.
    """

    def __init__(
        self,
        blame: Blame,
        take_in: Callable[[bytes, Submit], list[ClientEvent]],
        is_live: Callable[[RequestKey], bool],
        max_num_held: int,
    ) -> None:
        self._blame = blame
        self._take_in = take_in
        self._is_live = is_live
        self._max_num_held = max_num_held
        self._held: dict[RequestKey, tuple[bytes, Submit]] = {}
        """With their names for all lives of the core, in order of arrival."""
        self._frontends: dict[bytes, bytes] = {}
        """What each client is called in all its connections."""

    @property
    def has_requests(self) -> bool:
        """True while a request waits here."""
        return bool(self._held)

    @property
    def waiting_keys(self) -> list[RequestKey]:
        """The requests that wait here."""
        return list(self._held)

    @property
    def has_ready(self) -> bool:
        """True when `take_ready` has something to do."""
        return any(self._blame.may_enter(name) for name, _ in self._held.values())

    def connect(self, client: bytes, frontend_id: bytes) -> None:
        """Learn what a client is called in all its connections."""
        self._frontends[client] = frontend_id or client

    def disconnect(self, client: bytes) -> None:
        """A client is gone, and its requests have been aborted."""
        self._frontends.pop(client, None)

    def submit(self, client: bytes, submit: Submit) -> list[ClientEvent]:
        """Hand a request on, or keep it; what is returned otherwise says why it ended at once."""
        key = (client, submit.request_id)
        name = self._name(key)
        if key in self._held or self._blame.is_taken_in(key):
            message = f"request_id {submit.request_id!r} is in use"
            return [(client, Failed(submit.request_id, FailureKind.INVALID, message, "request_id"))]
        if not submit.is_continued:
            self._blame.forget(name)
        elif (why := self._blame.verdict(name)) is not None:
            logger.error("request %s of frontend %s is given up: %s", submit.request_id, client.hex(), why)
            return [(client, Failed(submit.request_id, FailureKind.INTERNAL, why))]
        self._blame.arrive(name)
        if self._blame.may_enter(name):
            return self._hand_on(key, name, submit)
        if not submit.is_continued and 0 < self._max_num_held <= len(self._held):
            self._blame.leave(name)
            message = f"{len(self._held)} requests wait until one is found that kills the engine"
            return [(client, Failed(submit.request_id, FailureKind.OVERLOADED, message, "max_num_queued_reqs"))]
        self._held[key] = (name, submit)
        return []

    def take_ready(self) -> list[ClientEvent]:
        """Hand on the requests that may come in by now; return how those ended that could not."""
        events: list[ClientEvent] = []
        for key, (name, submit) in list(self._held.items()):
            if self._blame.may_enter(name):
                del self._held[key]
                events += self._hand_on(key, name, submit)
        return events

    def abort(self, client: bytes, request_ids: list[RequestId]) -> list[ClientEvent]:
        """End requests that wait here; other ids are ignored."""
        events: list[ClientEvent] = []
        for request_id in request_ids:
            if (held := self._held.pop((client, request_id), None)) is not None:
                self._blame.leave(held[0])
                events.append((client, Finished(request_id, FinishReason.ABORT)))
        return events

    def note(self, events: Sequence[ClientEvent]) -> None:
        """Learn from what frontends are told who is over, and that there is progress."""
        for client, event in events:
            if isinstance(event, Tokens):
                self._blame.box.note_progress()
            elif not self._is_live(key := (client, event.request_id)):
                self._blame.release(key)

    def _hand_on(self, key: RequestKey, name: bytes, submit: Submit) -> list[ClientEvent]:
        self._blame.take_in(name, key, submit)
        return self._take_in(key[0], submit)

    def _name(self, key: RequestKey) -> bytes:
        client, request_id = key
        frontend = self._frontends.get(client, client)[: hashlib.blake2b.MAX_KEY_SIZE]
        return hashlib.blake2b(request_id.encode(), digest_size=NAME_BYTES, key=frontend).digest()
