"""What the core owes its frontends: events on their way, kept and merged while one reads too slowly.

Knows who is connected; knows nothing of what the requests are.
"""

import logging
import math
from collections.abc import Callable, Iterable

from octavo.protocol.channel import FrontendRouter, PeerLost
from octavo.protocol.events import EngineDying, Event, Events, Refused, Reply, RequestEvent, StatsReport, Tokens
from octavo.protocol.ids import RequestId

logger = logging.getLogger(__name__)

MAX_BACKLOG_EVENTS = 16384
"""A frontend that is owed more is given up, and told so when it reads again. Merged, that is several events for each
request it can have."""


class Backlog:
    """Events of one frontend in order, the tokens of each request merged into one event."""

    def __init__(self) -> None:
        self.events: list[RequestEvent] = []
        self.replies: list[Reply] = []
        """Answers to utility calls; they have no order among the events."""
        self._last_tokens: dict[RequestId, int] = {}

    @property
    def is_empty(self) -> bool:
        """True when nothing is owed."""
        return not self.events and not self.replies

    def add(self, event: RequestEvent) -> None:
        """Append an event, or merge it into the one it continues."""
        index = self._last_tokens.pop(event.request_id, None)
        if isinstance(event, Tokens):
            if index is not None:
                earlier = self.events[index]
                assert isinstance(earlier, Tokens)
                self.events[index] = _merge(earlier, event)
            else:
                index = len(self.events)
                self.events.append(event)
            self._last_tokens[event.request_id] = index
        else:
            self.events.append(event)

    def forget_events(self) -> None:
        """The events have been sent."""
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
        self._epoch = epoch
        self._clock = clock
        self._max_backlog_events = max_backlog_events
        self._backlogs: dict[bytes, Backlog] = {}
        """Of every connected frontend, in order of connection."""
        self._lost: list[bytes] = []
        self._given_up: set[bytes] = set()
        """Frontends that have not been told yet that they are lost: what they wait for will never come."""
        self.last_told = -math.inf
        """When one of them was told at last: it will connect again, with the requests that it still has."""
        self.has_backlog = False
        """True while a frontend is owed something: flush again soon."""

    @property
    def has_lost(self) -> bool:
        """True when `take_lost` has something to tell."""
        return bool(self._lost)

    @property
    def has_given_up(self) -> bool:
        """True while a frontend that was given up has not been told: flush again, now and then."""
        return bool(self._given_up)

    def connect(self, client: bytes) -> None:
        """From now on the frontend gets events."""
        self._backlogs.setdefault(client, Backlog())

    def is_connected(self, client: bytes) -> bool:
        """True between `connect` and the loss of the frontend."""
        return client in self._backlogs

    def put(self, events: Iterable[tuple[bytes, RequestEvent]]) -> None:
        """Send events, one frame sequence for each frontend; those for unknown frontends are dropped."""
        for client, event in events:
            if client in self._backlogs:
                self._backlogs[client].add(event)
        self.flush()

    def reply(self, client: bytes, reply: Reply) -> None:
        """Answer a utility call, now or as soon as the frontend reads."""
        if client in self._backlogs:
            self._backlogs[client].replies.append(reply)
            self.flush()

    def flush(self) -> None:
        """Send what is owed, as far as the frontends take it."""
        for client, backlog in list(self._backlogs.items()):
            if backlog.events and self.send(client, Events(self._epoch, backlog.events, self._clock())):
                backlog.forget_events()
            while backlog.replies and self.send(client, backlog.replies[0]):
                del backlog.replies[0]
            if len(backlog.events) + len(backlog.replies) > self._max_backlog_events:
                self._lose(client, "does not read its events")
                self._given_up.add(client)
        for client in list(self._given_up):
            if self.send(client, Refused("it did not read its events")):
                self._given_up.discard(client)
                self.last_told = self._clock()
        self.has_backlog = not all(backlog.is_empty for backlog in self._backlogs.values())

    def send(self, client: bytes, event: Event) -> bool:
        """Send a message that is not kept when the frontend is slow (False)."""
        try:
            return self._router.send(client, event)
        except PeerLost:
            self._lose(client, "is gone")
            self._given_up.discard(client)
            return False

    def broadcast(self, event: StatsReport | EngineDying) -> None:
        """Send to every frontend; one that is gone is noticed thereby."""
        for client in list(self._backlogs):
            self.send(client, event)

    def take_lost(self) -> list[bytes]:
        """Return the frontends lost since the last call: their requests are nobody's."""
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
    )
