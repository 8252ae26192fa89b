"""A frontend of the simulation: the real link and in-flight requests over a simulated wire that checks all messages."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

from octavo.frontend.link import CoreLink
from octavo.frontend.loop_socket import Slices
from octavo.frontend.recovery.downtime import ReconnectPolicy
from octavo.frontend.recovery.in_flight import InFlightRequest
from octavo.frontend.request_stream import RequestStream
from octavo.frontend.routing.model_link import ModelLink
from octavo.frontend.routing.routed_link import RoutedLink
from octavo.frontend.routing.router import LIVE_COST_TOKENS, PENDING_DIVISOR, PrefixRouter
from octavo.protocol.codec import Frame
from octavo.protocol.config import CachePlan
from octavo.protocol.errors import EngineDeadError, OverloadedError
from octavo.protocol.events import BoolResult, Event, Events, Reply, RequestEvent, Tokens, Welcome, split_events
from octavo.protocol.ids import RequestId
from octavo.protocol.requests import Abort, Call, Connect, GetSnapshot, GetStats, ResetPrefixCache, Submit
from octavo.protocol.snapshot import EngineSnapshot
from octavo.protocol.stats import EngineStats
from simulation.callers import Caller, WrongAnswer, require
from simulation.core import EVENTS, REQUESTS, SimulatedCore
from simulation.grammar import vocabulary
from simulation.scenario import VOCAB_SIZE, Ask
from simulation.world import Action, Pipe, Process, World

PATIENCE = 100
"""A caller rejected by a full queue waits this many times as long as a rejected connection."""

BACK_OFF = 3
"""The backoff factor after each further rejection."""

MAX_TRIES = 5
"""After this many rejections a caller gives up."""

CALLS_EVERY = 5
"""One in this many requests is followed by a utility call."""

_CALLS = [(GetStats(), EngineStats), (GetSnapshot(), EngineSnapshot), (ResetPrefixCache(), BoolResult)]


class Connection:
    """The connection between a frontend and one life of a core."""

    def __init__(self, peer: bytes, core: SimulatedCore, from_core: Pipe, to_core: Pipe) -> None:
        self.peer = peer
        self.core = core
        self.from_core = from_core
        self.to_core = to_core


class SimulatedWire:
    """A connection to one life of a core, retried until it succeeds; replaces `Wire`.

    All messages are checked: the core sends events about live requests only, ends each once, and answers each call.
    """

    def __init__(
        self,
        process: Process,
        dial: Callable[["SimulatedWire"], Connection | None],
        hang_up: Callable[[Connection], None],
        retry_s: float,
        on_event: Callable[[Event], Slices | None],
        on_lost: Callable[["SimulatedWire"], None],
    ) -> None:
        self.connection: Connection | None = None
        self.live: set[RequestId] = set()
        """Requests submitted here that the core has not ended, including those whose callers have left."""
        self.calls: dict[int, type] = {}
        """Unanswered utility calls, and the expected type of the answer."""
        self.fault = ""
        """Why the last attempt to connect failed: it never does here."""
        self.is_welcome = False
        self.is_closed = False
        self._num_sent: Counter[RequestId] = Counter()
        """How often each request was submitted: one that a full queue rejected is submitted again."""
        self._process = process
        self._dial = dial
        self._hang_up = hang_up
        self._retry_s = retry_s
        self._on_event = on_event
        self._on_lost = on_lost
        self._unsent: list[list[Frame]] = []
        self._slices: Slices | None = None
        """The rest of the work on the latest message: a step of the process does one slice."""
        process.after(0.0, self._connect)

    @property
    def owed(self) -> list[RequestId]:
        """Requests that the core has read and not ended."""
        if self.connection is None:
            return []
        peer, num_read = self.connection.peer, self.connection.core.router.num_read
        return sorted(name for name in self.live if num_read[peer, name] == self._num_sent[name])

    @property
    def has_unread(self) -> bool:
        """True while messages that have arrived are still being read."""
        if self.is_closed or self.connection is None:
            return False
        return self._slices is not None or self.connection.from_core.has_arrived

    def send(self, frames: list[Frame]) -> None:
        """Send a message, as soon as the connection is up."""
        request = REQUESTS.decode(*frames)
        if isinstance(request, Submit):
            require(request.request_id not in self.live, request.request_id, "submitted while it is live")
            self.live.add(request.request_id)
            self._num_sent[request.request_id] += 1
        if self.connection is None:
            self._unsent.append(frames)
        else:
            self.connection.to_core.send(frames)

    def abort(self, request_ids: list[RequestId]) -> None:
        """Abort requests at once: there are no iterations of a loop to collect them in."""
        self.send(REQUESTS.encode(Abort(request_ids)))

    def call(self, call: Call, expected: type) -> None:
        """Make a utility call without the link."""
        self.calls[call.call_id] = expected
        self.send(REQUESTS.encode(call))

    def close(self, linger_ms: int | None = None) -> None:
        """Disconnect."""
        self.is_closed = True
        if self.connection is not None:
            self._hang_up(self.connection)

    def lose(self) -> None:
        """Handle a broken connection."""
        if not self.is_closed:
            self._on_lost(self)

    def note_arrival(self) -> None:
        """Note that a message has arrived; it is read when the process runs."""
        self._process.after(0.0, self._read)

    def _connect(self) -> None:
        if self.is_closed:
            return
        self.connection = self._dial(self)
        if self.connection is None:
            self._process.after(self._retry_s, self._connect)
            return
        for frames in self._unsent:
            self.connection.to_core.send(frames)
        self._unsent.clear()

    def _read(self) -> None:
        """Continue with the latest message, or take the next one."""
        assert self.connection is not None
        if self.is_closed:
            return
        if self._slices is not None:
            try:
                next(self._slices)
            except StopIteration:
                self._slices = None
            else:
                self._process.after(0.0, self._read)
                return
        frames = self.connection.from_core.take()
        if frames is None or self.is_closed:
            return
        event = EVENTS.decode(*frames)
        match event:
            case Events():
                for one in split_events(event.events):
                    self._check_order(one)
            case Reply():
                expected = self.calls.pop(event.call_id, None)
                if expected is None or not isinstance(event.result, expected):
                    raise WrongAnswer(f"call {event.call_id}: {event.result} where {expected} is right")
                return
            case Welcome():
                self.is_welcome = True
        self._slices = self._on_event(event)
        if self._slices is not None:
            self._process.after(0.0, self._read)

    def _check_order(self, event: RequestEvent) -> None:
        require(event.request_id in self.live, event.request_id, f"{event} for a request that is not live")
        if not isinstance(event, Tokens):
            self.live.remove(event.request_id)


class SimulatedLink(CoreLink):
    """The real link over a simulated wire. Created and used inside a running event loop, which runs no callback."""

    def __init__(self, open_wire: Callable[["SimulatedLink"], SimulatedWire]) -> None:
        self._open_simulated = open_wire
        self.num_adopted = 0
        """Requests that moved here from other engines."""
        super().__init__(None, "simulated")
        self.reconnect_policy = ReconnectPolicy(limit_s=None)

    @property
    def is_connected(self) -> bool:
        """True once a core has answered; users wait for this before the first request."""
        return self._welcome.done() and not self._welcome.exception()

    def receive(self, event: Event) -> Slices | None:
        """Handle a message from a wire."""
        slices = self._receive(event)
        if isinstance(event, Welcome) and not hasattr(self, "facts"):
            self.facts = event.facts
        return slices

    def note_loss(self, wire: SimulatedWire) -> None:
        """Handle a broken connection."""
        self._on_lost(wire)

    def adopt(self, entry: InFlightRequest, stream: RequestStream, num_new_tokens: int) -> None:
        """Continue a request of another engine."""
        self.num_adopted += 1
        super().adopt(entry, stream, num_new_tokens)

    def _open_wire(self) -> SimulatedWire:
        wire = self._open_simulated(self)
        wire.send(REQUESTS.encode(Connect(client="simulated", frontend_id=self._frontend_id)))
        return wire


Dial: TypeAlias = Callable[[SimulatedWire], Connection | None]
"""Connects to the live core of an engine; returns None while there is none."""
HangUp: TypeAlias = Callable[[Connection], None]
"""Tells the other end of a connection that it was closed here."""


class Port:
    """A frontend's side of one engine: the link, over one wire after another.

    Args:
        process: process of the frontend.
        dial: connects to the engine.
        hang_up: disconnects.
        retry_s: delay before another attempt.
    """

    def __init__(self, process: Process, dial: Dial, hang_up: HangUp, retry_s: float) -> None:
        self.wire: SimulatedWire
        """The current connection."""
        self._is_engine_gone = False
        self._process = process
        self._dial = dial
        self._hang_up = hang_up
        self._retry_s = retry_s
        self.link = SimulatedLink(self._open_wire)

    def hear_of_shutdown(self) -> None:
        """Mark the engine as shut down."""
        self._is_engine_gone = True
        self.link.fail("the engine was shut down")
        self.wire.is_closed = True

    def _open_wire(self, link: SimulatedLink) -> SimulatedWire:
        self.wire = SimulatedWire(
            self._process, self._dial, self._hang_up, self._retry_s, link.receive, self._note_loss
        )
        return self.wire

    def _note_loss(self, wire: SimulatedWire) -> None:
        if wire is not self.wire:
            return
        if self.link.is_connected:
            self.link.note_loss(wire)
        elif not self._is_engine_gone:
            self.link.fail("nobody answers")
            self.link = SimulatedLink(self._open_wire)  # as a user would retry


class SimulatedFrontend(Process):
    """One application.

    Args:
        world: the clock.
        asks: the requests of its callers.
        plan: plan of the cache of every engine.
        engines: how to connect to each.
        retry_s: delay before another attempt.
    """

    def __init__(
        self, world: World, asks: list[Ask], plan: CachePlan, engines: Sequence[tuple[Dial, HangUp]], retry_s: float
    ) -> None:
        super().__init__(world)
        self.callers = {ask.submit.request_id: Caller(ask, plan, self._on_change) for ask in asks}
        self.ports = [Port(self, dial, hang_up, retry_s) for dial, hang_up in engines]
        self._plan = plan
        self._routed: RoutedLink | None = None
        """Over the links to all engines, once it is connected to them."""
        self._out: set[int] = set()
        """Engines that get no new requests."""
        self._retry_s = retry_s
        self._num_asked = 0
        self._has_sent_vocabulary = False
        for ask in asks:
            self.at(ask.time, lambda ask=ask: self._ask(self.callers[ask.submit.request_id]))

    @property
    def link(self) -> CoreLink | ModelLink | None:
        """What requests are submitted to; None: users wait."""
        if self._routed is None:
            links = [port.link for port in self.ports]
            if failed := [link for link in links if link.failure]:
                return failed[0]
            if not all(link.is_connected for link in links):
                return None
            self._routed = RoutedLink(
                PrefixRouter(len(links), self._plan.num_blocks, self._plan.block_size, lambda: self.world.now)
            )
            for index, link in enumerate(links):
                self._routed.add(index, link)
            self._routed.serve(range(len(links)))
        return ModelLink(self._routed, self._routed.identity)

    def take_out(self, engine: int, duration: float, *, moves: bool) -> None:
        """Send no new requests to an engine for a while, as an administrator would have it.

        Args:
            engine: index of the engine.
            duration: how long.
            moves: its requests move to other engines.
        """
        routed = self._routed
        if routed is None or engine in self._out or len(self._out) + 1 == len(self.ports):
            return
        self._out.add(engine)
        routed.serve(set(range(len(self.ports))) - self._out)
        if moves:
            routed.move_away(engine)

        def serve_again() -> None:
            self._out.discard(engine)
            routed.serve(set(range(len(self.ports))) - self._out)

        self.after(duration, serve_again)

    def at(self, time: float, action: Action) -> None:
        """Act at a time, or when the process is resumed."""
        self.after(time - self.world.now, action)

    def _ask(self, caller: Caller) -> None:
        if not caller.is_waiting:
            return
        if (link := self.link) is None:
            self.after(self._retry_s, lambda: self._ask(caller))
            return
        submit = caller.ask.submit
        try:
            if submit.grammar is not None and not self._has_sent_vocabulary:
                link.send_vocabulary(vocabulary(VOCAB_SIZE))
                self._has_sent_vocabulary = True
            caller.stream = link.submit(submit, caller)
        except EngineDeadError as error:
            caller.end = error
            return
        if caller.ask.leaves_after == 0:
            self.after(self._retry_s, lambda: self._leave(caller))
        self._check_loads()
        self._num_asked += 1
        wire = self.ports[self._num_asked % len(self.ports)].wire
        if self._num_asked % CALLS_EVERY == 0 and wire.is_welcome:
            utility, expected = _CALLS[self._num_asked // CALLS_EVERY % len(_CALLS)]
            wire.call(Call(-self._num_asked, utility), expected)

    def _check_loads(self) -> None:
        """Check that the router knows every change of the load of every link."""
        if self._routed is None:
            return
        for index, port in enumerate(self.ports):
            (num_pending, num_live), known = port.link.load, self._routed._router._loads[index]
            expected = num_pending // PENDING_DIVISOR + LIVE_COST_TOKENS * num_live
            require(known == expected, f"engine {index}", f"its load is {expected}, for the router {known}")

    def _on_change(self, caller: Caller) -> None:
        """Let a caller react to an event."""
        end = caller.end
        if isinstance(end, OverloadedError) and caller.num_rejections < MAX_TRIES:
            caller.end = None
            delay = PATIENCE * self._retry_s * BACK_OFF ** (caller.num_rejections - 1)
            self.after(delay, lambda: self._ask(caller))
        elif end is None and len(caller.token_ids) >= (caller.ask.leaves_after or len(caller.token_ids) + 1):
            self.after(0.0, lambda: self._leave(caller))

    def _leave(self, caller: Caller) -> None:
        """Handle a caller that has disconnected."""
        if caller.is_waiting:
            caller.has_left = True
            if link := self.link:
                link.abort([caller.name])
