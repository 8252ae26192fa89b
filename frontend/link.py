"""Sends the requests of a frontend to an engine, and hands each event to its request.

It does not handle text. One link belongs to one event loop; call every method on that loop. `recovery/in_flight.py`
decides which requests are submitted again to a new core.
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
from octavo.frontend.utility_calls import UtilityCalls, error_of
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
"""Number of events delivered, or requests resubmitted, in one slice; `LoopSocket` runs several slices at once."""

MAX_FAILED_AT_ONCE = 256
"""Number of requests failed per iteration of the event loop after the engine has died: about a millisecond of work."""

_END = object()


class CoreLink(CoreConnection):
    """The requests and calls of one frontend to an engine. It outlives the engine's cores."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: ClientKeys | None = None) -> None:
        self.latest_stats = EngineStats()
        self.on_stats: Callable[[EngineStats], None] = lambda stats: None
        self.on_load: Callable[[], None] = lambda: None
        """Called when `load` has changed."""
        self.on_facts: Callable[[], None] = lambda: None
        """Called when the engine has switched to other weights."""
        self.link_of: dict[RequestId, CoreLink] = {}
        """The link of each live request; `RoutedLink` has one dictionary for all its links."""
        self.on_cache_update: Callable[[CacheUpdate], None] | None = None
        """Called with every update after `watch_cache`."""
        self.num_lost_requests = 0
        """Number of live requests that failed because the engine died."""
        self._streams: dict[RequestId, RequestStream] = {}
        self._busy_since_s = 0.0
        self._in_flight = InFlightRequests()
        self._calls = UtilityCalls()
        self._watch = 0
        """Number of the latest `WatchCache`; updates with another number are outdated."""
        self._num_live = 0
        """Number of live requests of all frontends, as last reported by the core."""
        self._vocabulary: list[Frame] = []
        """The encoded vocabulary, which every new core receives. Empty before the first request with a grammar."""
        self._closing: asyncio.Task[None] | None = None
        super().__init__(context, address, keys)

    @property
    def num_live_requests(self) -> int:
        """Number of requests submitted here that have not ended."""
        return len(self._streams)

    @property
    def busy_since_s(self) -> float | None:
        """Monotonic time since which requests have been live. `None` if there are none."""
        return self._busy_since_s if self._streams else None

    @property
    def load(self) -> tuple[int, int]:
        """Number of this frontend's prompt tokens that wait to be computed, and of live requests of all frontends.

        The second number is at least the number of this frontend's requests; the core reported the others a moment ago.
        """
        return self._in_flight.num_pending_tokens, max(len(self._streams), self._num_live)

    @property
    def expects_answer(self) -> bool:
        """Whether a core is up and owes a reply or the end of a request."""
        return self.is_up and bool(self._streams or self._calls)

    def send_vocabulary(self, vocabulary: ModelVocabulary) -> None:
        """Send the model's vocabulary to this core and all later ones, before the first request with a grammar.

        Raises:
            InvalidRequestError: the vocabulary is too large for a message.
        """
        self._vocabulary = self._frames(vocabulary)
        if not self.downtime:
            self._wire.send(self._vocabulary)

    def watch_cache(self, on_cache_update: Callable[[CacheUpdate], None] | None) -> None:
        """Make this core and all later ones report the contents of their prefix cache. `None`: stop reporting.

        Another call makes the core report everything again.
        """
        self.on_cache_update = on_cache_update
        if self.is_up:
            self._watch += on_cache_update is not None
            self._wire.send(self._requests.encode(WatchCache(self._watch if on_cache_update else 0)))

    def submit(self, submit: Submit, arrived: WakeEvent, num_new_tokens: int = 0) -> RequestStream:
        """Send a request and return its event stream. While there is no core, the request waits for the next one.

        Args:
            submit: the request.
            arrived: set whenever the stream has new events; several streams may share one.
            num_new_tokens: estimated number of prompt tokens that the engine has to compute; counted in `load`.

        Raises:
            EngineDeadError: the engine is gone for good.
            OverloadedError: too many requests already wait for a core.
            InvalidRequestError: a live request has the same id, or a value cannot be encoded.
        """
        if self.failure:
            raise self.failure
        if submit.request_id in self.link_of:
            raise InvalidRequestError(f"request_id {submit.request_id!r} is in use", "request_id")
        if not isinstance(submit.priority, int) or not isinstance(submit.cache_salt, str | None):
            # The only values that come from the caller unchecked.
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
        """Give up requests that another engine can continue, at most `max_count`. A live core is told to abort them."""
        entries = self._in_flight.release(max_count, after_crash=not self.is_up)
        if self.is_up and entries:
            self._wire.abort([entry.submit.request_id for entry in entries])
        released = [(entry, self._drop(entry.submit.request_id)) for entry in entries]
        self.on_load()
        return released

    def adopt(self, entry: InFlightRequest, stream: RequestStream, num_new_tokens: int) -> None:
        """Continue a request that another link has released."""
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
        """Make a utility call; if the core dies before it replies, repeat the call on the next core.

        Raises:
            EngineDeadError: the engine is gone for good.
            InvalidRequestError: a value cannot be encoded.
            OctavoError: the call failed; `error_of` maps the cause to a type.
            RequestFailedError: no reply came in time.
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
            raise error_of(result)
        return result

    def fail_rest(self) -> None:
        """Fail all live requests: the engine is gone, and no other engine takes them over."""
        assert self.failure is not None, "the engine has failed"
        self.num_lost_requests = max(self.num_lost_requests, len(self._streams))
        self._fail_some(self.failure)

    def _fail_some(self, error: EngineDeadError) -> None:
        """Fail live requests, at most `MAX_FAILED_AT_ONCE` per iteration of the event loop."""
        for request_id in list(islice(self._streams, MAX_FAILED_AT_ONCE)):
            self._in_flight.remove(request_id)
            self._drop(request_id).fail(error)
        self.on_load()
        if self._streams:
            asyncio.get_running_loop().call_soon(self._fail_some, error)

    async def close(self) -> None:
        """Abort all requests and disconnect. Idempotent, also when called concurrently."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="octavo link: close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        is_connected = not self.failure and not self.downtime
        live = list(self._streams)
        # Before the aborts: a caller must not mistake the reply to an abort for its result.
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
        """Submit all requests that the core has not been sent yet, including those added meanwhile."""
        while not self.failure and (submits := self._in_flight.take_unsent(SLICE_SIZE)):
            for submit in submits:
                # perf: not `_frames`: the values were checked when the request arrived.
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
        # A new core sends no report before it has work: reset the load, or it would look as busy as the old core.
        if is_another:
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
        """Hand events to their requests. If the core is lost meanwhile, the remaining events are dropped."""
        for index, event in enumerate(events, start=1):
            shown = self._in_flight.deliver(event)
            if shown is not None:  # otherwise the request was aborted here while the event was in transit
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
