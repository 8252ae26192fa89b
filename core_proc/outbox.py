"""`Outbox`: sends events to frontends, and keeps and merges those that a slow frontend has not read.

Knows which frontends are connected, and nothing of what requests are.
"""

import logging
import math
from collections.abc import Callable, Iterable

from octavo.protocol.channel import FrontendRouter, PeerLost
from octavo.protocol.events import (
    EngineDying,
    Event,
    Events,
    FactsChanged,
    Refused,
    Reply,
    RequestEvent,
    StatsReport,
    StepEvent,
    Tokens,
    split_events,
)
from octavo.protocol.ids import RequestId

logger = logging.getLogger(__name__)

MAX_BACKLOG_EVENTS = 16384
"""A frontend with a larger backlog is dropped, and told so once it reads again. As tokens are merged, this is several
events for each request that it can have."""


class Backlog:
    """Events of one frontend in order, the tokens of each request merged into one event."""

    def __init__(self) -> None:
        self.events: list[StepEvent] = []
        """One request at a time: the tokens of a slow frontend are merged by request."""
        self.replies: list[Reply | FactsChanged] = []
        """Answers to utility calls, and news of weights. They have no order relative to events."""
        self._last_tokens: dict[RequestId, int] = {}

    @property
    def is_empty(self) -> bool:
        """True when nothing is left to send."""
        return not self.events and not self.replies

    def extend(self, events: Iterable[StepEvent]) -> None:
        """Append events, or merge them into those that they continue."""
        for event in split_events(events):
            self._add(event)

    def _add(self, event: RequestEvent) -> None:
        index = self._last_tokens.pop(event.request_id, None)
        if isinstance(event, Tokens):
            earlier = None if index is None else self.events[index]
            # Tokens of different weights stay apart.
            if index is not None and isinstance(earlier, Tokens) and earlier.weight_version == event.weight_version:
                self.events[index] = _merge(earlier, event)
            else:
                index = len(self.events)
                self.events.append(event)
            self._last_tokens[event.request_id] = index
        else:
            self.events.append(event)

    def clear_events(self) -> None:
        """Forget the events, which have been sent."""
        self.events = []
        self._last_tokens.clear()


class Outbox:
    """All connected frontends and their backlogs."""

    def __init__(
        self,
        router: FrontendRouter,
        epoch: int,
        clock: Callable[[], float],
        max_backlog_events: int = MAX_BACKLOG_EVENTS,
    ) -> None:
        self._router = router
        self.epoch = epoch
        """Of the core that sends."""
        self._clock = clock
        self._max_backlog_events = max_backlog_events
        self._backlogs: dict[bytes, Backlog] = {}
        """Backlogs of all connected frontends, in order of connection."""
        self._lost: list[bytes] = []
        self._dropped: set[bytes] = set()
        """Dropped frontends that have not been told yet that no more events will come."""
        self.last_notice_s = -math.inf
        """When a dropped frontend was last told: it may reconnect and resubmit its requests."""
        self.has_backlog = False
        """True while a frontend has not read everything: call `flush` again soon."""

    @property
    def has_lost(self) -> bool:
        """True when `take_lost` has something to return."""
        return bool(self._lost)

    @property
    def has_dropped(self) -> bool:
        """True while a dropped frontend has not been told: call `flush` now and then."""
        return bool(self._dropped)

    def connect(self, client: bytes) -> None:
        """Add a frontend: it gets events from now on."""
        self._backlogs.setdefault(client, Backlog())

    def is_connected(self, client: bytes) -> bool:
        """True between `connect` and the loss of the frontend."""
        return client in self._backlogs

    def put(self, events: Iterable[tuple[bytes, StepEvent]]) -> None:
        """Send events, one message for each frontend; those for unknown frontends are dropped."""
        by_client: dict[bytes, list[StepEvent]] = {}
        for client, event in events:
            if client in by_client:
                by_client[client].append(event)
            else:
                by_client[client] = [event]
        now = self._clock()
        for client, added in by_client.items():
            if (backlog := self._backlogs.get(client)) is None:
                continue
            # perf: a frontend that reads has no backlog, and its events need not be merged.
            if backlog.events or not self.send(client, Events(self.epoch, added, now)):
                backlog.extend(added)
                self.has_backlog = True
        if self.has_backlog:
            self.flush()

    def reply(self, client: bytes, reply: Reply) -> None:
        """Answer a utility call, now or as soon as the frontend reads."""
        if client in self._backlogs:
            self._backlogs[client].replies.append(reply)
            self.flush()

    def announce(self, changed: FactsChanged) -> None:
        """Tell every frontend about other weights, now or as soon as it reads."""
        for backlog in self._backlogs.values():
            backlog.replies.append(changed)
        self.flush()

    def flush(self) -> None:
        """Send what is left, as far as the frontends read it."""
        for client, backlog in list(self._backlogs.items()):
            if backlog.events and self.send(client, Events(self.epoch, backlog.events, self._clock())):
                backlog.clear_events()
            while backlog.replies and self.send(client, backlog.replies[0]):
                del backlog.replies[0]
            if len(backlog.events) + len(backlog.replies) > self._max_backlog_events:
                self._lose(client, "does not read its events")
                self._dropped.add(client)
        for client in list(self._dropped):
            if self.send(client, Refused("it did not read its events")):
                self._dropped.discard(client)
                self.last_notice_s = self._clock()
        self.has_backlog = not all(backlog.is_empty for backlog in self._backlogs.values())

    def send(self, client: bytes, event: Event) -> bool:
        """Send a message; False, and the message is not kept, if the frontend is too slow to take it."""
        try:
            return self._router.send(client, event)
        except PeerLost:
            self._lose(client, "is gone")
            self._dropped.discard(client)
            return False

    def broadcast(self, event: StatsReport | EngineDying) -> None:
        """Send to every frontend. This also finds those that are gone."""
        for client in list(self._backlogs):
            self.send(client, event)

    def take_lost(self) -> list[bytes]:
        """Return the frontends lost since the last call, whose requests nobody waits for any more."""
        lost, self._lost = self._lost, []
        return lost

    def _lose(self, client: bytes, why: str) -> None:
        if self._backlogs.pop(client, None) is not None:
            logger.info("frontend %s %s", client.hex(), why)
            self._lost.append(client)


def _merge(earlier: Tokens, later: Tokens) -> Tokens:
    logprobs = None if earlier.logprobs is None else earlier.logprobs + (later.logprobs or [])
    return Tokens(
        request_id=earlier.request_id,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=logprobs,
        prompt_logprobs=earlier.prompt_logprobs,
        num_cached_tokens=earlier.num_cached_tokens,
        times=earlier.times + later.times,
        weight_version=earlier.weight_version,
    )
