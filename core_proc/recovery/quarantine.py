"""`Quarantine`: every request enters here. It is forwarded at once, unless crash suspects run in isolation.

A suspect is not processed until its group may run. While suspects run, no other request is forwarded.
`crash_attribution.py` decides which requests may run. Because every request passes here, the quarantine also tracks the
requests of each client.
"""

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Sequence

from octavo.core_proc.recovery.crash_attribution import CrashAttribution
from octavo.core_proc.recovery.crash_journal import NAME_BYTES
from octavo.core_proc.request_map import RequestKey, RequestMap
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.protocol.events import Failed, FailureKind, Finished, FinishReason, StreamedTokens, Tokens
from octavo.protocol.ids import RequestId
from octavo.protocol.requests import Submit

logger = logging.getLogger(__name__)

MAX_RELEASED_AT_ONCE = 256
"""Most requests forwarded per loop iteration, so that the end of a long quarantine does not delay steps."""


class Quarantine:
    """All live requests by client, and those among them that were not forwarded yet.

    Args:
        attribution: decides which requests may run, and is notified of forwarded requests.
        forward: passes a request on.
        is_live: returns whether a forwarded request has not ended.
        max_num_quarantined: most new requests that may be held; 0: no limit.
    """

    def __init__(
        self,
        attribution: CrashAttribution,
        forward: Callable[[bytes, Submit], list[ClientEvent]],
        is_live: Callable[[RequestKey], bool],
        max_num_quarantined: int,
    ) -> None:
        self._attribution = attribution
        self._forward_to = forward
        self._is_live = is_live
        self._max_num_quarantined = max_num_quarantined
        self._quarantined = RequestMap[tuple[bytes, Submit]]()
        """Held requests, with names that survive restarts."""
        self._releasable: deque[RequestKey] = deque()
        """Requests that could run when `_version` was current."""
        self._version = attribution.version
        self._is_open = True
        self._frontends: dict[bytes, tuple[bytes, bytes]] = {}
        """For each connected client, its identity (one object shared by all its requests) and the name that it keeps
        when it reconnects."""

    @property
    def num_held(self) -> int:
        """Number of held requests."""
        return len(self._quarantined)

    @property
    def num_live(self) -> int:
        """Number of live requests of all clients, including held ones."""
        return len(self._quarantined) + len(self._attribution.tracked)

    @property
    def clients(self) -> list[bytes]:
        """The clients that have live requests."""
        return list(dict.fromkeys([*self._attribution.tracked.clients, *self._quarantined.clients]))

    def requests_of(self, client: bytes) -> list[RequestId]:
        """Return the live requests of a client: first the forwarded ones, then the held ones."""
        return [*self._attribution.tracked.ids_of(client), *self._quarantined.ids_of(client)]

    def is_live(self, key: RequestKey) -> bool:
        """Return whether a request has not ended, forwarded or held."""
        return key in self._quarantined or key in self._attribution.tracked

    @property
    def has_ready(self) -> bool:
        """True if `release_ready` may have work to do."""
        return (
            self._is_open
            and bool(self._quarantined)
            and (bool(self._releasable) or self._version != self._attribution.version)
        )

    def hold(self, *, is_open: bool) -> None:
        """Hold all new requests from now on; stop holding them if `is_open`."""
        self._version = -1 if is_open and not self._is_open else self._version
        self._is_open = is_open

    def connect(self, client: bytes, frontend_id: bytes) -> None:
        """Register the name that a client keeps when it reconnects."""
        self._frontends[client] = (client, frontend_id or client)

    def disconnect(self, client: bytes) -> None:
        """Drop a disconnected client whose requests have been aborted."""
        self._frontends.pop(client, None)

    def submit(self, client: bytes, submit: Submit) -> list[ClientEvent]:
        """Forward a request, or hold it. Return events if it ends at once."""
        client, frontend = self._frontends.get(client, (client, client))
        key = (client, submit.request_id)
        name = _name_of(frontend, submit.request_id)
        if self.is_live(key):
            message = f"request_id {submit.request_id!r} is in use"
            return [(client, Failed(submit.request_id, FailureKind.INVALID, message, "request_id"))]
        if not submit.is_continued:
            self._attribution.reset(name)
        elif (error := self._attribution.error_of(name)) is not None:
            logger.error("request %s of frontend %s fails: %s", submit.request_id, client.hex(), error)
            return [(client, Failed(submit.request_id, FailureKind.INTERNAL, error))]
        can_run = self._is_open and self._attribution.can_run(name)
        if not can_run and not submit.is_continued and 0 < self._max_num_quarantined <= len(self._quarantined):
            until = "the one that crashes the engine is found" if self._is_open else "generation is resumed"
            message = f"{len(self._quarantined)} requests wait until {until}"
            return [(client, Failed(submit.request_id, FailureKind.OVERLOADED, message, "max_num_queued_reqs"))]
        self._attribution.add(name, key)
        if can_run:
            return self._forward(key, submit)
        self._quarantined[key] = (name, submit)
        return []

    def release_ready(self) -> list[ClientEvent]:
        """Forward a bounded number of requests that may run by now. Return events for those that fail."""
        if not self._is_open:
            return []
        if self._version != self._attribution.version:
            self._version = self._attribution.version
            can_run = self._attribution.can_run
            self._releasable = deque([key for key, (name, _) in self._quarantined.items() if can_run(name)])
        events: list[ClientEvent] = []
        for _ in range(min(MAX_RELEASED_AT_ONCE, len(self._releasable))):
            key = self._releasable.popleft()
            if (held := self._quarantined.get(key)) is not None and self._attribution.can_run(held[0]):
                self._quarantined.pop(key)
                events += self._forward(key, held[1])
        return events

    def abort(self, client: bytes, request_ids: list[RequestId]) -> list[ClientEvent]:
        """Abort held requests. Other ids are ignored."""
        events: list[ClientEvent] = []
        if not self._quarantined:
            return events
        for request_id in request_ids:
            if self._quarantined.pop(key := (client, request_id)) is not None:
                self._attribution.remove(key)
                events.append((client, Finished(request_id, FinishReason.ABORT)))
        return events

    def observe(self, events: Sequence[ClientEvent]) -> list[RequestId]:
        """Note progress from the events for frontends, and return the ids of the requests that have ended.

        A rejected duplicate of a live id has not ended.
        """
        ended = []
        for client, event in events:
            if isinstance(event, Tokens | StreamedTokens):
                self._attribution.note_progress()
            elif (key := (client, event.request_id)) not in self._quarantined and not self._is_live(key):
                self._attribution.finish(key)
                ended.append(event.request_id)
        return ended

    def _forward(self, key: RequestKey, submit: Submit) -> list[ClientEvent]:
        self._attribution.track(key, submit)
        return self._forward_to(key[0], submit)


def _name_of(frontend: bytes, request_id: RequestId) -> bytes:
    """Return the name that a request has in all cores to which its frontend submits it."""
    key = frontend[: hashlib.blake2b.MAX_KEY_SIZE]
    return hashlib.blake2b(request_id.encode(), digest_size=NAME_BYTES, key=key).digest()
