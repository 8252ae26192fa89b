"""The connection to a core: sends requests, hands each event to its request, and survives the replacement of the core.

Knows nothing of text. One link serves one event loop; every method must be called on it.
`recovery/in_flight.py` decides what is submitted again to a new core; the link does not start cores.
"""

# long: one connection from its first message to its last, whose parts share the same few fields

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from itertools import islice

import zmq

from octavo.frontend.loop_socket import Slices
from octavo.frontend.metrics.observer import RestartCause
from octavo.frontend.recovery.downtime import Downtime, ReconnectPolicy, Resumption
from octavo.frontend.recovery.in_flight import InFlightRequest, InFlightRequests
from octavo.frontend.request_stream import RequestStream
from octavo.frontend.utility_calls import UtilityCalls
from octavo.frontend.wake_event import WakeEvent
from octavo.frontend.wire import Wire
from octavo.protocol.channel import MAX_FRAME_BYTES
from octavo.protocol.codec import Frame, request_codec
from octavo.protocol.curve import ClientKeys
from octavo.protocol.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    ProtocolError,
    RequestFailedError,
    StartupError,
)
from octavo.protocol.events import (
    CacheUpdate,
    CallFailed,
    EngineDying,
    EngineFacts,
    Event,
    Events,
    Refused,
    Reply,
    RequestEvent,
    StatsReport,
    UtilityResult,
    Welcome,
    split_events,
)
from octavo.protocol.ids import RequestId
from octavo.protocol.requests import Call, Connect, FrontendMessage, ModelVocabulary, Submit, Utility, WatchCache
from octavo.protocol.stats import EngineStats

logger = logging.getLogger(__name__)

FRONTEND_ID_BYTES = 16

SLICE_SIZE = 8
"""Events delivered, or requests submitted again, in one slice; `LoopSocket` does several slices at once."""

MAX_FAILED_AT_ONCE = 256
"""Requests that fail in one iteration of the event loop when the engine is gone: about a millisecond."""

WRONG_ENGINE_DELAY_S = 0.05
"""Delay before another attempt when another engine answers for the first time; each further time it doubles."""

MAX_WRONG_ENGINE_DELAY_S = 1.0

_GONE = "the engine's core process is gone"
_END = object()


class CoreLink:
    """One frontend's connection to an engine; it outlives the engine's cores."""

    facts: EngineFacts
    """What the latest core reported about itself."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: ClientKeys | None = None) -> None:
        self._keys = keys
        self._frontend_id = os.urandom(FRONTEND_ID_BYTES)
        self.address = address
        self.index = 0
        """Of the engine, among those of a client."""
        self.latest_stats = EngineStats()
        self.on_stats: Callable[[EngineStats], None] = lambda stats: None
        self.on_resumed: Callable[[Resumption], None] = lambda resumption: None
        """Called when another core has taken over."""
        self.on_lost: Callable[[], bool] = lambda: False
        """Called when the core has died. True: other engines get the requests, at once or later, and `fail_rest` is
        called at the end if this engine has failed for good."""
        self.on_down: Callable[[], None] = lambda: None
        """Called when there is no core any more, also if it is about to be replaced; before `on_lost`."""
        self.on_up: Callable[[], None] = lambda: None
        """Called when there is a core again, another one or the same."""
        self.on_load: Callable[[], None] = lambda: None
        """Called when `load` has changed."""
        self.link_of: dict[RequestId, CoreLink] = {}
        """The link of each live request; `RoutedLink` has one dictionary for all its links."""
        self.on_cache_update: Callable[[CacheUpdate], None] | None = None
        """Called with every update after `watch_cache`."""
        self.accepts: Callable[[EngineFacts], bool] = lambda facts: True
        """Whether a core that answers after a downtime is one of this engine: another one may have got its address."""
        self.reconnect_policy = ReconnectPolicy()
        self.failure: EngineDeadError | None = None
        """Why no request can be served any more; None while the engine lives."""
        self.num_lost_requests = 0
        """Live requests that failed because the engine died."""
        self.downtime: Downtime | None = None
        """Set while there is no core, but there may be one again."""
        self.last_words = ""
        """Why the core is about to exit, if it sent that."""
        self.num_heard = 0
        """Messages received from cores so far."""
        self._context = context
        self._streams: dict[RequestId, RequestStream] = {}
        self._busy_since_s = 0.0
        self._wrong_engine_delay_s = WRONG_ENGINE_DELAY_S
        self._in_flight = InFlightRequests()
        self._calls = UtilityCalls()
        self._watch = 0
        """The number of the latest `WatchCache`."""
        self._num_live = 0
        """Live requests of all frontends, as the core reported them last."""
        self._vocabulary: list[Frame] = []
        """The message that is sent to every core; empty before the first request with a grammar."""
        self._closing: asyncio.Task[None] | None = None
        self._giving_up: asyncio.TimerHandle | None = None
        self._welcome: asyncio.Future[EngineFacts] = asyncio.get_running_loop().create_future()
        self._requests = request_codec()
        self._wire = self._open_wire()

    @classmethod
    async def connect(
        cls, context: "zmq.Context[zmq.Socket[bytes]]", address: str, timeout_s: float, keys: ClientKeys | None = None
    ) -> "CoreLink":
        """Connect to the core that listens on `address`, with `keys` if it is on another machine.

        Raises:
            StartupError: no engine answers there, or it has another version of the protocol.
            EngineDeadError: it ended before it answered.
        """
        link = cls(context, address, keys)
        try:
            link.facts = await asyncio.wait_for(asyncio.shield(link._welcome), timeout_s)
        except TimeoutError:
            fault = link._wire.fault
            await link.close()
            raise StartupError(
                f"the engine on {address} is not ready: it still loads its model"
                if link._wire.has_met
                else f"no engine answers on {address}" + (f": {fault}" if fault else ""),
                phase="connecting",
                hint="octavo serve prints the address of its engine once it is ready",
            ) from None
        except BaseException:  # a cancelled connect, too, must not leave an open socket behind
            await link.close()
            raise
        return link

    @property
    def num_live_requests(self) -> int:
        """Requests submitted here that have not ended."""
        return len(self._streams)

    @property
    def busy_since_s(self) -> float | None:
        """Since when there have been live requests, on the monotonic clock; None: there are none."""
        return self._busy_since_s if self._streams else None

    @property
    def load(self) -> tuple[int, int]:
        """Prompt tokens of this frontend that wait to be computed, and live requests of all frontends.

        The second number is at least that of this frontend's requests; those of others were reported a moment ago.
        """
        return self._in_flight.num_pending_tokens, max(len(self._streams), self._num_live)

    @property
    def is_up(self) -> bool:
        """True while there is a core."""
        return not self.failure and not self.downtime

    @property
    def expects_answer(self) -> bool:
        """True while a core that lives owes an answer or the end of a request."""
        return self.is_up and bool(self._streams or self._calls)

    def send_vocabulary(self, vocabulary: ModelVocabulary) -> None:
        """Send the model's vocabulary to this core and all later ones, before the first request with a grammar.

        Raises:
            InvalidRequestError: it is too large for a message.
        """
        self._vocabulary = self._frames(vocabulary)
        if not self.downtime:
            self._wire.send(self._vocabulary)

    def watch_cache(self, on_cache_update: Callable[[CacheUpdate], None] | None) -> None:
        """Have this core and all later ones report what they have cached, None: report nothing any more.

        Call it again to get everything again.
        """
        self.on_cache_update = on_cache_update
        if self.is_up:
            self._watch += on_cache_update is not None
            self._wire.send(self._requests.encode(WatchCache(self._watch if on_cache_update else 0)))

    def submit(self, submit: Submit, arrived: WakeEvent, num_new_tokens: int = 0) -> RequestStream:
        """Send a request, or keep it until there is a core again; return its stream.

        Args:
            submit: the request.
            arrived: set whenever the stream has something to take; several streams may share one.
            num_new_tokens: of the prompt, which the engine probably has to compute; for `load`.

        Raises:
            EngineDeadError: the engine is gone.
            OverloadedError: too many wait for a core already.
            InvalidRequestError: a live request has the same id, or a value cannot be encoded.
        """
        if self.failure:
            raise self.failure
        if submit.request_id in self.link_of:
            raise InvalidRequestError(f"request_id {submit.request_id!r} is in use", "request_id")
        if not isinstance(submit.priority, int) or not isinstance(submit.cache_salt, str | None):
            # The caller's own values; all others were made by this process.
            raise InvalidRequestError("priority must be an integer and cache_salt must be text")
        frames = self._frames(submit)
        in_flight = self._in_flight
        must_wait = self.downtime is not None or in_flight.has_unsent or in_flight.is_ending(submit.request_id)
        if must_wait and 0 < self.reconnect_policy.max_num_waiting <= in_flight.num_new:
            message = f"{in_flight.num_new} requests wait for the engine to be restarted"
            raise OverloadedError(message, "max_num_queued_reqs")
        in_flight.add(submit, is_sent=not must_wait, num_new_tokens=num_new_tokens)
        if not must_wait:
            self._wire.send(frames)
        stream = RequestStream(submit.request_id, arrived, self.index)
        self._add(stream)
        return stream

    def release(self, max_count: int) -> list[tuple[InFlightRequest, RequestStream]]:
        """Give up requests that another engine can continue; a core that is up need not finish them."""
        entries = self._in_flight.release(max_count, after_crash=not self.is_up)
        if self.is_up and entries:
            self._wire.abort([entry.submit.request_id for entry in entries])
        released = [(entry, self._drop(entry.submit.request_id)) for entry in entries]
        self.on_load()
        return released

    def adopt(self, entry: InFlightRequest, stream: RequestStream, num_new_tokens: int) -> None:
        """Continue a request that another engine has released."""
        assert self.is_up, "requests move to an engine that has a core"
        stream.engine = self.index
        if (submit := self._in_flight.adopt(entry, num_new_tokens)) is not None:
            self._wire.send(self._requests.encode(submit))
        self._add(stream)

    def abort(self, request_ids: list[RequestId]) -> None:
        """Abort and forget requests; their streams receive nothing more."""
        live = [request_id for request_id in request_ids if request_id in self._streams]
        for request_id in live:
            self._drop(request_id)
        known = [request_id for request_id in live if self._in_flight.abort(request_id)]
        self.on_load()
        if known and not self.failure and not self.downtime:
            self._wire.abort(known)

    async def call(self, utility: Utility, timeout_s: float = 60.0) -> UtilityResult:
        """Make a utility call; if the core dies before it answers, the call is repeated on the next core.

        Raises:
            EngineDeadError: the engine is gone.
            InvalidRequestError: a value cannot be encoded.
            RequestFailedError: the call failed, or was not answered in time.
        """
        if self.failure:
            raise self.failure
        call = Call(self._calls.next_id(), utility)
        frames = self._frames(call)
        if not self.downtime:
            self._wire.send(frames)
        try:
            result = await asyncio.wait_for(self._calls.add(call), timeout_s)
        except TimeoutError:
            raise RequestFailedError(f"the engine did not answer within {timeout_s:.0f} s") from None
        finally:
            self._calls.remove(call)
        if isinstance(result, CallFailed):
            raise RequestFailedError(result.message)
        return result

    def lose(self, cause: str, kind: RestartCause = "core_died") -> None:
        """Handle the loss of the core: wait for another, or fail if the reconnect policy says so."""
        if self.failure:
            return
        if self.reconnect_policy.limit_s == 0 or not self._welcome.done():
            self.fail(cause)
            return
        if self.downtime is None:
            self._begin_downtime(cause, kind)
        elif self.downtime.cause == _GONE:  # the process watcher knows the real cause
            self.downtime = Downtime(cause, self.downtime.since_s, kind)
        self._wire.close(linger_ms=0)
        self._wire = self._open_wire()

    def move_to(self, address: str) -> None:
        """Look for the core at another address: the engine was started again elsewhere."""
        self.address = address
        self.lose(f"the engine is at {address} now")

    def fail(self, cause: str) -> None:
        """Mark the engine as gone for good: every live request and call fails with the first cause given."""
        if self.failure:
            return
        self.failure = EngineDeadError(cause)
        self.downtime = None
        if self._giving_up:
            self._giving_up.cancel()
        self._in_flight.lose_core()
        self.on_down()
        if not self.on_lost():
            self.fail_rest()
        self._calls.fail(self.failure)
        if not self._welcome.done():
            self._welcome.set_exception(self.failure)
            self._welcome.exception()  # possibly nobody waits for it, which is not an error

    def fail_rest(self) -> None:
        """Fail all live requests: the engine is gone, and no other takes them."""
        assert self.failure is not None, "the engine has failed"
        self.num_lost_requests = max(self.num_lost_requests, len(self._streams))
        self._fail_some(self.failure)

    def _fail_some(self, error: EngineDeadError) -> None:
        """Fail live requests, some in each iteration of the event loop."""
        for request_id in list(islice(self._streams, MAX_FAILED_AT_ONCE)):
            self._in_flight.remove(request_id)
            self._drop(request_id).fail(error)
        self.on_load()
        if self._streams:
            asyncio.get_running_loop().call_soon(self._fail_some, error)

    async def close(self) -> None:
        """Abort all requests and disconnect; calling it again, even concurrently, does no harm."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="octavo link: close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        is_connected = not self.failure and not self.downtime
        live = list(self._streams)
        # Before the aborts: no caller may take the answer to one for its result.
        self.fail("the connection to the engine was closed")
        while self._streams:  # noqa: ASYNC110  (`_fail_some` continues in the next iterations)
            await asyncio.sleep(0)
        if is_connected:
            self._wire.abort(live)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wire.drain(), 1.0)
        self._wire.close()

    def _reopen_wire(self, wire: Wire) -> None:
        """Connect again, possibly to another address, unless that has happened meanwhile."""
        if wire is self._wire and self.downtime:
            wire.close(linger_ms=0)
            self._wire = self._open_wire()

    def _add(self, stream: RequestStream) -> None:
        if not self._streams:
            self._busy_since_s = time.monotonic()
        self._streams[stream.request_id] = stream
        self.link_of[stream.request_id] = self
        self.on_load()

    def _drop(self, request_id: RequestId) -> RequestStream:
        del self.link_of[request_id]
        return self._streams.pop(request_id)

    def _open_wire(self) -> Wire:
        """Open a connection and introduce this frontend."""
        wire = Wire(self._context, self.address, self._receive, self._on_lost, self._fail_broken, self._keys)
        program = os.path.basename(sys.argv[0]).encode(errors="replace").decode() or "python"
        wire.send(self._requests.encode(Connect(client=f"{program} pid={os.getpid()}", frontend_id=self._frontend_id)))
        return wire

    def _on_lost(self, wire: Wire) -> None:
        if wire is not self._wire:
            return
        if wire.fault and not self._welcome.done():
            self._welcome.set_exception(
                StartupError(f"no engine answers on {self.address}: {wire.fault}", phase="connecting")
            )
        else:
            self.lose(_GONE)

    def _begin_downtime(self, cause: str, kind: RestartCause) -> None:
        self.downtime = Downtime(cause, time.monotonic(), kind)
        self._wrong_engine_delay_s = WRONG_ENGINE_DELAY_S
        level = logging.INFO if kind == "planned" else logging.ERROR
        logger.log(level, "the core is gone: %s; %d requests wait for the next one", cause, len(self._in_flight))
        self._in_flight.lose_core()
        self._calls.lose_core(cause)
        if (limit_s := self.reconnect_policy.limit_s) is not None:
            message = f"{cause}; none came back within {limit_s:g} s"
            self._giving_up = asyncio.get_running_loop().call_later(limit_s, self.fail, message)
        self.on_down()
        if kind != "planned":
            self.on_lost()

    def _end_downtime(self, facts: EngineFacts) -> Slices:
        """Handle a new core: send it the vocabulary and all live calls and requests."""
        assert self.downtime is not None
        downtime, self.downtime = self.downtime, None
        if self._giving_up:
            self._giving_up.cancel()
        # The same core may be back, after it was only unreachable.
        is_another = (facts.epoch, facts.pulse_path) != (self.facts.epoch, self.facts.pulse_path)
        kind = "planned" if facts.replaced_epoch == self.facts.epoch else downtime.kind
        self.facts = facts
        self.last_words = ""
        if is_another:  # it reports nothing before it has work, and would look as busy as the last one was
            self.latest_stats = EngineStats()
            self._num_live = 0
            self.on_load()
        if self._vocabulary:
            self._wire.send(self._vocabulary)
        if self.on_cache_update:
            self.watch_cache(self.on_cache_update)
        for call in self._calls.unanswered():
            self._wire.send(self._frames(call))
        pause_s, num_requests = time.monotonic() - downtime.since_s, len(self._in_flight)
        logger.info("the engine is back after %.2f s: %d requests continue (%s)", pause_s, num_requests, downtime.cause)
        if is_another:
            self.on_resumed(Resumption(downtime.cause, kind, pause_s, num_requests))
        self.on_up()
        return self._send_unsent()

    def _send_unsent(self) -> Slices:
        """Submit everything that the core has not been sent yet, also what is added meanwhile."""
        while not self.failure and (submits := self._in_flight.take_unsent(SLICE_SIZE)):
            for submit in submits:
                # perf: what it is made of has been checked when it came.
                self._wire.send(self._requests.encode(submit))
            yield

    def _fail_broken(self, error: Exception) -> None:
        """Fail every request: a message could not be handled, so its request would wait forever."""
        self.fail(f"the link to the engine broke: {type(error).__name__}: {error}")

    def _frames(self, request: FrontendMessage) -> list[Frame]:
        """Encode a message. Its values were checked when it was made.

        Raises:
            InvalidRequestError: a value has no form in a message, or is too large for one.
        """
        try:
            frames = self._requests.encode(request)
        except (ProtocolError, TypeError, OverflowError, UnicodeEncodeError) as error:
            raise InvalidRequestError(f"a value of the request cannot be encoded: {error}") from error
        if (size := max(map(len, frames))) > MAX_FRAME_BYTES:
            raise InvalidRequestError(
                f"the request takes {size} bytes as a message; at most {MAX_FRAME_BYTES} are allowed"
            )
        return frames

    def _receive(self, event: Event) -> Slices | None:
        """Handle a message; return the work that remains, which is done before the next one."""
        self.num_heard += 1
        match event:
            case Events():
                if not self.downtime and event.epoch == self.facts.epoch:
                    rest = self._deliver(split_events(event.events))
                    return None if next(rest, _END) is _END else rest
            case StatsReport():
                self.latest_stats = event.stats
                self._num_live = event.stats.num_running + event.stats.num_waiting
                self.on_load()
                self.on_stats(event.stats)
            case CacheUpdate():
                is_current = event.watch == self._watch and event.epoch == self.facts.epoch
                if self.on_cache_update and is_current and not self.downtime:
                    self._num_live = event.num_live
                    self.on_load()
                    self.on_cache_update(event)
            case Reply():
                self._calls.reply(event)
            case Welcome():
                return self._on_welcome(event.facts)
            case Refused():
                self._on_rejected(event.message)
            case EngineDying():
                self.last_words = event.message
                if event.message:
                    self.lose(event.message)
                else:
                    self.fail("the engine was shut down")
        return None

    def _on_welcome(self, facts: EngineFacts) -> Slices | None:
        if not self._welcome.done():
            self._welcome.set_result(facts)
        elif self.downtime and self.accepts(facts):
            return self._end_downtime(facts)
        elif self.downtime:
            delay_s = self._wrong_engine_delay_s
            if delay_s == WRONG_ENGINE_DELAY_S:
                logger.warning(
                    "another engine answers on %s: engine %d is looked for there until it is back or removed",
                    *(self.address, self.index),
                )
            self._wrong_engine_delay_s = min(2 * delay_s, MAX_WRONG_ENGINE_DELAY_S)
            asyncio.get_running_loop().call_later(delay_s, self._reopen_wire, self._wire)
        return None

    def _on_rejected(self, message: str) -> None:
        if not self._welcome.done():
            self._welcome.set_exception(StartupError(message, phase="connecting"))
        elif self.downtime:  # the new core is of another release
            self.fail(message)
        else:  # the core has given this frontend up: it did not read its events
            self.lose(f"the engine has ended the connection: {message}")

    def _deliver(self, events: Iterable[RequestEvent]) -> Slices:
        """Hand events to their requests. If the core is lost meanwhile, the rest is dropped with its connection."""
        for index, event in enumerate(events, start=1):
            shown = self._in_flight.deliver(event)
            if shown is not None:  # else it was aborted here while the event was on its way
                stream = self._streams[event.request_id]
                stream.put(shown)
                if stream.is_over:
                    self._drop(event.request_id)
            elif (held := self._in_flight.take_held(event.request_id)) is not None:
                self._wire.send(self._requests.encode(held))
            if index % SLICE_SIZE == 0:
                self.on_load()
                yield
        self.on_load()
