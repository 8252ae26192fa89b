"""`Outbox`: sends events to frontends, and queues and merges the events of slow frontends.

Knows which frontends are connected, but nothing about requests.
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
"""A frontend with a larger backlog is dropped, and notified when it reads again. Because tokens are merged, this is
several events for each request that it can have."""


class Backlog:
    """The unsent events of one frontend, in order. The tokens of each request are merged into one event."""

    def __init__(self) -> None:
        self.events: list[StepEvent] = []
        """Events about one request each: merged by request."""
        self.replies: list[Reply | FactsChanged] = []
        """Replies to utility calls, and notices of changed weights. Their order relative to events does not matter."""
        self._last_tokens: dict[RequestId, int] = {}

    @property
    def is_empty(self) -> bool:
        """True if nothing is left to send."""
        return not self.events and not self.replies

    def extend(self, events: Iterable[StepEvent]) -> None:
        """Append events, or merge them into earlier events of the same request."""
        for event in split_events(events):
            self._add(event)

    def _add(self, event: RequestEvent) -> None:
        index = self._last_tokens.pop(event.request_id, None)
        if isinstance(event, Tokens):
            earlier = None if index is None else self.events[index]
            # Tokens sampled with different weights stay separate.
            if index is not None and isinstance(earlier, Tokens) and earlier.weight_version == event.weight_version:
                self.events[index] = _merge(earlier, event)
            else:
                index = len(self.events)
                self.events.append(event)
            self._last_tokens[event.request_id] = index
        else:
            self.events.append(event)

    def clear_events(self) -> None:
        """Clear the events after they were sent."""
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
        """Epoch of the sending core."""
        self._clock = clock
        self._max_backlog_events = max_backlog_events
        self._backlogs: dict[bytes, Backlog] = {}
        """Backlogs of all connected frontends, in order of connection."""
        self._lost: list[bytes] = []
        self._dropped: set[bytes] = set()
        """Dropped frontends that were not yet notified that no more events will come."""
        self.last_notice_s = -math.inf
        """When a dropped frontend was last notified. It may reconnect and resubmit its requests."""
        self.has_backlog = False
        """True while a frontend has unread events: call `flush` again soon."""

    @property
    def has_lost(self) -> bool:
        """True if `take_lost` has something to return."""
        return bool(self._lost)

    @property
    def has_dropped(self) -> bool:
        """True while a dropped frontend was not notified: call `flush` periodically."""
        return bool(self._dropped)

    def connect(self, client: bytes) -> None:
        """Add a frontend. It receives events from now on."""
        self._backlogs.setdefault(client, Backlog())

    def is_connected(self, client: bytes) -> bool:
        """Return whether a frontend is connected and not lost."""
        return client in self._backlogs

    def put(self, events: Iterable[tuple[bytes, StepEvent]]) -> None:
        """Send events in one message per frontend. Events for unknown frontends are dropped."""
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
            # perf: a frontend without backlog receives its events directly, without merging.
            if backlog.events or not self.send(client, Events(self.epoch, added, now)):
                backlog.extend(added)
                self.has_backlog = True
        if self.has_backlog:
            self.flush()

    def reply(self, client: bytes, reply: Reply) -> None:
        """Reply to a utility call, now or as soon as the frontend reads."""
        if client in self._backlogs:
            self._backlogs[client].replies.append(reply)
            self.flush()

    def announce(self, changed: FactsChanged) -> None:
        """Notify every frontend of changed weights, now or as soon as it reads."""
        for backlog in self._backlogs.values():
            backlog.replies.append(changed)
        self.flush()

    def flush(self) -> None:
        """Send backlogs, as far as the frontends read them."""
        for client, backlog in list(self._backlogs.items()):
            if backlog.events and self.send(client, Events(self.epoch, backlog.events, self._clock())):
                backlog.clear_events()
            while backlog.replies and self.send(client, backlog.replies[0]):
                del backlog.replies[0]
            if len(backlog.events) + len(backlog.replies) > self._max_backlog_events:
                self._lose(client, "does not read its events")
                self._dropped.add(client)
        for client in list(self._dropped):
            if self.send(client, Refused("the frontend did not read its events")):
                self._dropped.discard(client)
                self.last_notice_s = self._clock()
        self.has_backlog = not all(backlog.is_empty for backlog in self._backlogs.values())

    def send(self, client: bytes, event: Event) -> bool:
        """Send a message. Return False and drop the message if the frontend is too slow to accept it."""
        try:
            return self._router.send(client, event)
        except PeerLost:
            self._lose(client, "is gone")
            self._dropped.discard(client)
            return False

    def broadcast(self, event: StatsReport | EngineDying) -> None:
        """Send a message to every frontend. This also detects disconnected frontends."""
        for client in list(self._backlogs):
            self.send(client, event)

    def take_lost(self) -> list[bytes]:
        """Return the frontends lost since the last call. Nobody waits for their requests any more."""
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
