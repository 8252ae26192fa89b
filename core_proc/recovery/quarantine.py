"""`Quarantine`: every request enters here. It is forwarded at once, unless crash suspects run in isolation.

A suspect is not touched until its group may run, and while suspects run no other request is forwarded.
`crash_attribution.py` decides which requests may run. As every request passes here, it also knows those of each client.
"""

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Sequence

from octavo.core_proc.recovery.crash_attribution import CrashAttribution
from octavo.core_proc.recovery.crash_journal import NAME_BYTES
from octavo.core_proc.request import RequestKey
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.protocol.events import Failed, FailureKind, Finished, FinishReason, StreamedTokens, Tokens
from octavo.protocol.ids import RequestId
from octavo.protocol.requests import Submit

logger = logging.getLogger(__name__)

MAX_RELEASED_AT_ONCE = 256
"""Requests forwarded per turn of the loop, so that the end of a long quarantine does not delay steps."""


class Quarantine:
    """All live requests by client, and those among them that were not forwarded yet.

    Args:
        attribution: knows which requests may run, and is told which were forwarded.
        forward: hands a request on.
        is_live: whether a forwarded request has not ended.
        max_num_quarantined: new requests that may be held; 0: no limit.
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
        self._quarantined: dict[RequestKey, tuple[bytes, Submit]] = {}
        """Requests that are held, with their restart-proof names, in order of arrival."""
        self._live: dict[bytes, dict[RequestId, None]] = {}
        """All live requests by client, in order of arrival."""
        self._releasable: deque[RequestKey] = deque()
        """Requests that could run when `_version` was current."""
        self._version = attribution.version
        self._frontends: dict[bytes, tuple[bytes, bytes]] = {}
        """Each connected client's identity, one object for all of its requests, and the name that it keeps when it
        reconnects."""

    @property
    def num_held(self) -> int:
        """Requests that are held."""
        return len(self._quarantined)

    @property
    def num_live(self) -> int:
        """Live requests of all clients, those that are held included."""
        return sum(map(len, self._live.values()))

    @property
    def clients(self) -> list[bytes]:
        """The clients that have live requests."""
        return list(self._live)

    def requests_of(self, client: bytes) -> list[RequestId]:
        """Return the live requests of a client, in order of arrival."""
        return list(self._live.get(client, ()))

    def is_live(self, key: RequestKey) -> bool:
        """Return whether a request has not ended, wherever it is."""
        return key in self._quarantined or self._attribution.is_tracked(key)

    @property
    def has_ready(self) -> bool:
        """True when `release_ready` may have something to do."""
        return bool(self._quarantined) and (bool(self._releasable) or self._version != self._attribution.version)

    def connect(self, client: bytes, frontend_id: bytes) -> None:
        """Register the name that a client keeps when it reconnects."""
        self._frontends[client] = (client, frontend_id or client)

    def disconnect(self, client: bytes) -> None:
        """Drop a client that is gone, whose requests have been aborted."""
        self._frontends.pop(client, None)

    def submit(self, client: bytes, submit: Submit) -> list[ClientEvent]:
        """Forward a request, or hold it; a returned event says why it ended at once."""
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
        can_run = self._attribution.can_run(name)
        if not can_run and not submit.is_continued and 0 < self._max_num_quarantined <= len(self._quarantined):
            message = f"{len(self._quarantined)} requests wait until the one that crashes the engine is found"
            return [(client, Failed(submit.request_id, FailureKind.OVERLOADED, message, "max_num_queued_reqs"))]
        self._attribution.add(name)
        self._live.setdefault(client, {})[submit.request_id] = None
        if can_run:
            return self._forward(key, name, submit)
        self._quarantined[key] = (name, submit)
        return []

    def release_ready(self) -> list[ClientEvent]:
        """Forward the requests that may run by now, a bounded number; return how those ended that could not."""
        if self._version != self._attribution.version:
            self._version = self._attribution.version
            can_run = self._attribution.can_run
            self._releasable = deque([key for key, (name, _) in self._quarantined.items() if can_run(name)])
        events: list[ClientEvent] = []
        for _ in range(min(MAX_RELEASED_AT_ONCE, len(self._releasable))):
            key = self._releasable.popleft()
            if (held := self._quarantined.get(key)) is not None and self._attribution.can_run(held[0]):
                del self._quarantined[key]
                events += self._forward(key, *held)
        return events

    def abort(self, client: bytes, request_ids: list[RequestId]) -> list[ClientEvent]:
        """End requests that are held; other ids are ignored."""
        events: list[ClientEvent] = []
        if not self._quarantined:
            return events
        for request_id in request_ids:
            if (held := self._quarantined.pop((client, request_id), None)) is not None:
                self._attribution.remove(held[0])
                self._forget((client, request_id))
                events.append((client, Finished(request_id, FinishReason.ABORT)))
        return events

    def observe(self, events: Sequence[ClientEvent]) -> None:
        """Note which requests have ended and whether there is progress, from the events for frontends."""
        for client, event in events:
            if isinstance(event, Tokens | StreamedTokens):
                self._attribution.note_progress()
            elif (key := (client, event.request_id)) not in self._quarantined and not self._is_live(key):
                self._attribution.finish(key)
                self._forget(key)

    def _forward(self, key: RequestKey, name: bytes, submit: Submit) -> list[ClientEvent]:
        self._attribution.track(name, key, submit)
        return self._forward_to(key[0], submit)

    def _forget(self, key: RequestKey) -> None:
        """Remove a request that has ended from those of its client."""
        client, request_id = key
        if (live := self._live.get(client)) is not None:
            live.pop(request_id, None)
            if not live:
                del self._live[client]


def _name_of(frontend: bytes, request_id: RequestId) -> bytes:
    """Return the name of a request in all cores that its frontend submits it to."""
    key = frontend[: hashlib.blake2b.MAX_KEY_SIZE]
    return hashlib.blake2b(request_id.encode(), digest_size=NAME_BYTES, key=key).digest()
