"""The requests of a frontend to an engine: sends them, and hands each event to its request.

Knows nothing of text. One link serves one event loop; every method must be called on it.
`recovery/in_flight.py` decides what is submitted again to a new core.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from itertools import islice

import msgspec
import zmq

from octavo.frontend.core_connection import CoreConnection
from octavo.frontend.loop_socket import Slices
from octavo.frontend.recovery.in_flight import InFlightRequest, InFlightRequests
from octavo.frontend.request_stream import RequestStream
from octavo.frontend.utility_calls import UtilityCalls
from octavo.frontend.wake_event import WakeEvent
from octavo.protocol.codec import Frame
from octavo.protocol.curve import ClientKeys
from octavo.protocol.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
)
from octavo.protocol.events import (
    CacheUpdate,
    CallFailed,
    Event,
    Events,
    FactsChanged,
    Reply,
    RequestEvent,
    StatsReport,
    UtilityResult,
    split_events,
)
from octavo.protocol.ids import RequestId
from octavo.protocol.requests import Call, ModelVocabulary, Submit, Utility, WatchCache
from octavo.protocol.stats import EngineStats

SLICE_SIZE = 8
"""Events delivered, or requests submitted again, in one slice; `LoopSocket` does several slices at once."""

MAX_FAILED_AT_ONCE = 256
"""Requests that fail in one iteration of the event loop when the engine is gone: about a millisecond."""

_END = object()


class CoreLink(CoreConnection):
    """The requests and calls of one frontend to an engine, across its cores."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: ClientKeys | None = None) -> None:
        self.latest_stats = EngineStats()
        self.on_stats: Callable[[EngineStats], None] = lambda stats: None
        self.on_load: Callable[[], None] = lambda: None
        """Called when `load` has changed."""
        self.on_facts: Callable[[], None] = lambda: None
        """Called when the engine has other weights."""
        self.link_of: dict[RequestId, CoreLink] = {}
        """The link of each live request; `RoutedLink` has one dictionary for all its links."""
        self.on_cache_update: Callable[[CacheUpdate], None] | None = None
        """Called with every update after `watch_cache`."""
        self.num_lost_requests = 0
        """Live requests that failed because the engine died."""
        self._streams: dict[RequestId, RequestStream] = {}
        self._busy_since_s = 0.0
        self._in_flight = InFlightRequests()
        self._calls = UtilityCalls()
        self._watch = 0
        """The number of the latest `WatchCache`."""
        self._num_live = 0
        """Live requests of all frontends, as the core reported them last."""
        self._vocabulary: list[Frame] = []
        """The message that is sent to every core; empty before the first request with a grammar."""
        self._closing: asyncio.Task[None] | None = None
        super().__init__(context, address, keys)

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

    def _add(self, stream: RequestStream) -> None:
        if not self._streams:
            self._busy_since_s = time.monotonic()
        self._streams[stream.request_id] = stream
        self.link_of[stream.request_id] = self
        self.on_load()

    def _drop(self, request_id: RequestId) -> RequestStream:
        del self.link_of[request_id]
        return self._streams.pop(request_id)

    def _send_unsent(self) -> Slices:
        """Submit everything that the core has not been sent yet, also what is added meanwhile."""
        while not self.failure and (submits := self._in_flight.take_unsent(SLICE_SIZE)):
            for submit in submits:
                # perf: what it is made of has been checked when it came.
                self._wire.send(self._requests.encode(submit))
            yield

    @property
    def num_unfinished(self) -> int:
        """See `CoreConnection`."""
        return len(self._in_flight)

    def _on_failed(self, failure: EngineDeadError) -> None:
        self._in_flight.lose_core()
        self.on_down()
        if not self.on_lost():
            self.fail_rest()
        self._calls.fail(failure)

    def _suspend(self, cause: str) -> None:
        self._in_flight.lose_core()
        self._calls.lose_core(cause)

    def _continue(self, *, is_another: bool) -> Slices:
        if is_another:  # it reports nothing before it has work, and would look as busy as the last one was
            self.latest_stats = EngineStats()
            self._num_live = 0
            self.on_load()
            self.on_stats(self.latest_stats)
        if self._vocabulary:
            self._wire.send(self._vocabulary)
        if self.on_cache_update:
            self.watch_cache(self.on_cache_update)
        for call in self._calls.unanswered():
            self._wire.send(self._frames(call))
        return self._send_unsent()

    def _handle(self, event: Event) -> Slices | None:
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
            case FactsChanged():
                self.facts = msgspec.structs.replace(self.facts, **msgspec.structs.asdict(event))
                self.on_facts()
            case Reply():
                self._calls.reply(event)
        return None

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
