"""The way to a core: sends requests, hands each event to its request, and goes on when another core takes over.

Knows nothing of text. One link serves one event loop; every method must be called on it. What is asked again of a new
core is decided in `recovery/ledger.py`; who starts it is none of the link's business.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import zmq

from octavo.frontend.metrics.observer import RestartCause
from octavo.frontend.recovery.ledger import Ledger
from octavo.frontend.recovery.outage import Outage, Patience, Resumption
from octavo.frontend.request_stream import RequestStream, Wakeable
from octavo.frontend.wire import Wire
from octavo.protocol.channel import MAX_FRAME_BYTES
from octavo.protocol.codec import request_codec
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
    CallFailed,
    EngineDying,
    EngineFacts,
    Event,
    Events,
    Refused,
    Reply,
    StatsReport,
    UtilityResult,
    Welcome,
)
from octavo.protocol.ids import RequestId
from octavo.protocol.requests import (
    Abort,
    Call,
    Connect,
    Request,
    StartProfile,
    StopProfile,
    Submit,
    Utility,
    Vocabulary,
)
from octavo.protocol.stats import EngineStats

logger = logging.getLogger(__name__)

_DIE_WITH_THE_CORE = (StartProfile, StopProfile)
"""Calls that make no sense to another core."""

FRONTEND_ID_BYTES = 16

_GONE = "the engine's core process is gone"


class CoreLink:
    """One frontend's connection to an engine, over the lives of its cores."""

    facts: EngineFacts
    """What the latest core said of itself."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: ClientKeys | None = None) -> None:
        self._keys = keys
        self._frontend_id = os.urandom(FRONTEND_ID_BYTES)
        self.address = address
        self.latest_stats = EngineStats()
        self.on_stats: Callable[[EngineStats], None] = lambda stats: None
        self.on_resumed: Callable[[Resumption], None] = lambda resumption: None
        """Told when another core has taken over."""
        self.patience = Patience()
        self.failure: EngineDeadError | None = None
        """Why no request can be served any more; None while the engine lives."""
        self.num_lost_requests = 0
        """Live requests that the engine's end has ended."""
        self.outage: Outage | None = None
        """Set while there is no core, but there may be one again."""
        self.last_words = ""
        """Why this core is about to exit, if it has said so."""
        self.num_heard = 0
        """Messages that have come from cores so far."""
        self._context = context
        self._streams: dict[RequestId, RequestStream] = {}
        self._ledger = Ledger()
        self._calls: dict[int, tuple[Utility, asyncio.Future[UtilityResult]]] = {}
        self._call_ids = itertools.count()
        self._vocabulary = b""
        """The frame that teaches it to each core; empty before the first request with a grammar."""
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
            StartupError: nobody answers there, or it speaks another version of the protocol.
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
    def is_up(self) -> bool:
        """True while there is a core."""
        return not self.failure and not self.outage

    @property
    def is_owed_something(self) -> bool:
        """True while a core that lives owes an answer or the end of a request."""
        return self.is_up and bool(self._streams or self._calls)

    def teach(self, vocabulary: Vocabulary) -> None:
        """Tell the core, and those after it, what tokens stand for, before the first request with a grammar.

        Raises:
            InvalidRequestError: it has no place in a message.
        """
        self._vocabulary = self._frame(vocabulary)
        if not self.outage:
            self._wire.send(self._vocabulary)

    def submit(self, submit: Submit, arrived: Wakeable) -> RequestStream:
        """Send a request, or keep it until there is a core again, and return its stream.

        Args:
            submit: the request.
            arrived: set whenever the stream has something to take; several streams may share one.

        Raises:
            EngineDeadError: the engine is gone.
            OverloadedError: too many wait for a core already.
            InvalidRequestError: a live request has the same id, or a value has no place in a message.
        """
        if self.failure:
            raise self.failure
        if submit.request_id in self._streams:
            raise InvalidRequestError(f"request_id {submit.request_id!r} is in use", "request_id")
        frame = self._frame(submit)
        must_wait = self.outage is not None
        if must_wait and 0 < self.patience.max_num_held <= self._ledger.num_new:
            message = f"{self._ledger.num_new} requests wait for the engine to be restarted"
            raise OverloadedError(message, "max_num_queued_reqs")
        self._ledger.add(submit, is_sent=not must_wait)
        if not must_wait:
            self._wire.send(frame)
        stream = RequestStream(submit.request_id, arrived)
        self._streams[submit.request_id] = stream
        return stream

    def abort(self, request_ids: list[RequestId]) -> None:
        """Stop requests and forget them: their streams get nothing more."""
        live = [request_id for request_id in request_ids if self._streams.pop(request_id, None)]
        known = [request_id for request_id in live if self._ledger.remove(request_id)]
        if known and not self.failure and not self.outage:
            self._post(Abort(known))

    async def call(self, utility: Utility, timeout_s: float = 60.0) -> UtilityResult:
        """Make a utility call; one that a core did not answer before its death is made again of the next.

        Raises:
            EngineDeadError: the engine is gone.
            InvalidRequestError: a value has no place in a message.
            RequestFailedError: the call failed, or was not answered in time.
        """
        if self.failure:
            raise self.failure
        call_id = next(self._call_ids)
        frame = self._frame(Call(call_id, utility))
        if not self.outage:
            self._wire.send(frame)
        future: asyncio.Future[UtilityResult] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = (utility, future)
        try:
            result = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise RequestFailedError(f"the engine did not answer within {timeout_s:.0f} s") from None
        finally:
            self._calls.pop(call_id, None)
        if isinstance(result, CallFailed):
            raise RequestFailedError(result.message)
        return result

    def lose(self, cause: str, kind: RestartCause = "core_died") -> None:
        """The core is gone: wait for another at the same address, as far as patience goes; else this is the end."""
        if self.failure:
            return
        if self.patience.limit_s == 0 or not self._welcome.done():
            self.fail(cause)
            return
        if self.outage is None:
            self._begin_outage(cause, kind)
        elif self.outage.cause == _GONE:  # whoever watches its process knows more
            self.outage = Outage(cause, self.outage.since_s, kind)
        self._wire.close(linger_ms=0)
        self._wire = self._open_wire()

    def fail(self, cause: str) -> None:
        """Mark the engine as gone for good: every live request and call ends with the first cause given."""
        if self.failure:
            return
        self.failure = EngineDeadError(cause)
        self.num_lost_requests = len(self._streams)
        self.outage = None
        if self._giving_up:
            self._giving_up.cancel()
        for stream in self._streams.values():
            stream.fail(self.failure)
        self._streams.clear()
        self._ledger = Ledger()
        pending: list[asyncio.Future[Any]] = [self._welcome, *(future for _, future in self._calls.values())]
        for future in pending:
            if not future.done():
                future.set_exception(self.failure)
                future.exception()  # nobody may be waiting: that is no error

    async def close(self) -> None:
        """Abort what still runs here and disconnect; harmless the second time, also while the first is under way."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="octavo link: close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if not self.failure and not self.outage:
            if self._streams:
                self._post(Abort(list(self._streams)))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wire.drain(), 1.0)
        self.fail("the connection to the engine was closed")
        self._wire.close()

    def _open_wire(self) -> Wire:
        """Begin a connection with who is calling."""
        wire = Wire(self._context, self.address, self._receive, self._on_lost, self._break_down, self._keys)
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

    def _begin_outage(self, cause: str, kind: RestartCause) -> None:
        self.outage = Outage(cause, time.monotonic(), kind)
        level = logging.INFO if kind == "planned" else logging.ERROR
        logger.log(level, "the core is gone: %s; %d requests wait for another", cause, len(self._ledger))
        self._ledger.lose_core()
        for utility, future in self._calls.values():
            if isinstance(utility, _DIE_WITH_THE_CORE) and not future.done():
                future.set_result(CallFailed(f"the engine died meanwhile: {cause}"))
        if (limit_s := self.patience.limit_s) is not None:
            message = f"{cause}; none came back within {limit_s:g} s"
            self._giving_up = asyncio.get_running_loop().call_later(limit_s, self.fail, message)

    def _end_outage(self, facts: EngineFacts) -> None:
        """There is a core again: teach it, and ask it for everything that is owed here."""
        assert self.outage is not None
        outage, self.outage = self.outage, None
        if self._giving_up:
            self._giving_up.cancel()
        # One that lives on was only out of reach.
        is_another = (facts.epoch, facts.pulse_path) != (self.facts.epoch, self.facts.pulse_path)
        kind = "planned" if facts.replaced_epoch == self.facts.epoch else outage.kind
        self.facts = facts
        self.last_words = ""
        if self._vocabulary:
            self._wire.send(self._vocabulary)
        num_requests = self._send_unsent()
        for call_id, (utility, future) in self._calls.items():
            if not future.done():
                self._post(Call(call_id, utility))
        pause_s = time.monotonic() - outage.since_s
        logger.info("the engine is back after %.2f s: %d requests go on (%s)", pause_s, num_requests, outage.cause)
        if is_another:
            self.on_resumed(Resumption(outage.cause, kind, pause_s, num_requests))

    def _send_unsent(self) -> int:
        """Ask the core for everything that it has not been asked for; return how many requests that were."""
        submits = self._ledger.take_unsent()
        for submit in submits:
            # perf: what it is made of has been checked when it came.
            self._wire.send(self._requests.encode(submit))
        return len(submits)

    def _break_down(self, error: Exception) -> None:
        """End every request: what came in could not be handled, and what it was for would wait for ever."""
        self.fail(f"the link to the engine broke: {type(error).__name__}: {error}")

    def _post(self, request: Request) -> None:
        self._wire.send(self._frame(request))

    def _frame(self, request: Request) -> bytes:
        """Encode a message, unless the core could not read it: it would drop it, and nobody would ever answer.

        Raises:
            InvalidRequestError: a value is of the wrong type, out of range or too large.
        """
        try:
            frame = self._requests.encode(request)
            self._requests.decode(frame)
        except (ProtocolError, TypeError, OverflowError, UnicodeEncodeError) as error:
            raise InvalidRequestError(f"a value of the request has no place in a message: {error}") from error
        if (size := len(frame)) > MAX_FRAME_BYTES:
            raise InvalidRequestError(f"the request is a message of {size} bytes; at most {MAX_FRAME_BYTES} are read")
        return frame

    def _receive(self, event: Event) -> None:
        self.num_heard += 1
        match event:
            case Events():
                self._deliver(event)
            case StatsReport():
                self.latest_stats = event.stats
                self.on_stats(event.stats)
            case Reply():
                _, future = self._calls.get(event.call_id, (None, None))
                if future and not future.done():
                    future.set_result(event.result)
            case Welcome():
                self._on_welcome(event.facts)
            case Refused():
                self._on_refused(event.message)
            case EngineDying():
                self.last_words = event.message
                if event.message:
                    self.lose(event.message)
                else:
                    self.fail("the engine was shut down")

    def _on_welcome(self, facts: EngineFacts) -> None:
        if self.outage:
            self._end_outage(facts)
        elif not self._welcome.done():
            self._welcome.set_result(facts)

    def _on_refused(self, message: str) -> None:
        if not self._welcome.done():
            self._welcome.set_exception(StartupError(message, phase="connecting"))
        elif self.outage:  # the new core is of another release
            self.fail(message)
        else:  # the core has given this frontend up: it did not read its events
            self.lose(f"the engine has ended the connection: {message}")

    def _deliver(self, events: Events) -> None:
        if self.outage or events.epoch != self.facts.epoch:
            return
        for event in events.events:
            shown = self._ledger.deliver(event)
            if shown is None:
                continue  # aborted here while the event was on its way
            stream = self._streams[event.request_id]
            stream.put(shown)
            if stream.is_over:
                del self._streams[event.request_id]
