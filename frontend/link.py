"""The socket to a core: sends requests, hands each event to the request it belongs to.

Knows nothing of text. One link serves one event loop; every method must be called on it.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

import zmq
import zmq.utils.monitor

from octavo.frontend.loop_socket import LoopSocket
from octavo.protocol.channel import HIGH_WATER_MARK, MAX_FRAME_BYTES, only_frame
from octavo.protocol.codec import event_codec, request_codec
from octavo.protocol.errors import (
    EngineDeadError,
    InvalidRequestError,
    OctavoError,
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
    Failed,
    FailureKind,
    Finished,
    Refused,
    Reply,
    RequestEvent,
    StatsReport,
    Tokens,
    UtilityResult,
    Welcome,
)
from octavo.protocol.ids import RequestId
from octavo.protocol.log import LimitedLog
from octavo.protocol.requests import Abort, Call, Connect, Request, Submit, Utility, Vocabulary
from octavo.protocol.stats import EngineStats

logger = logging.getLogger(__name__)

LINGER_MS = 200
"""How long what was sent last may take to leave after the link was closed."""

LAST_WORDS_S = 0.1
"""How long a vanished core's last message may still be on its way."""

_FAILURES: dict[FailureKind, Callable[[Failed], OctavoError]] = {
    FailureKind.INVALID: lambda failed: InvalidRequestError(failed.message, failed.param),
    FailureKind.OVERLOADED: lambda failed: OverloadedError(failed.message),
    FailureKind.INTERNAL: lambda failed: RequestFailedError(failed.message),
}


class Wakeable(Protocol):
    """What a consumer waits on: an `asyncio.Event` or the like."""

    def set(self) -> None:
        """Wake the consumer."""


class RequestStream:
    """Events of one request that its consumer has not taken yet.

    A slow consumer finds few large portions here instead of many small ones.
    """

    def __init__(self, request_id: RequestId, arrived: Wakeable) -> None:
        self.request_id = request_id
        self.is_over = False
        """True once the `Finished`, or the failure, has arrived."""
        self._events: list[Tokens | Finished] = []
        self._error: OctavoError | None = None
        self._arrived = arrived

    def put(self, event: RequestEvent) -> None:
        """Add an event and wake the consumer."""
        if isinstance(event, Failed):
            self.fail(_FAILURES[event.kind](event))
            return
        self._events.append(event)
        self.is_over = isinstance(event, Finished)
        self._arrived.set()

    def fail(self, error: OctavoError) -> None:
        """End the stream with an error, raised once what came before it has been taken."""
        self._error = error
        self.is_over = True
        self._arrived.set()

    def take(self) -> list[Tokens | Finished]:
        """Return everything that has arrived since the last call.

        Raises:
            OctavoError: how the request failed.
        """
        events, self._events = self._events, []
        if not events and self._error is not None:
            raise self._error
        if events and self._error is not None:
            self._arrived.set()  # come back for the error
        return events


class CoreLink:
    """One connection to one core."""

    facts: EngineFacts
    """What the core said of itself when the connection was made."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self.address = address
        self.latest_stats = EngineStats()
        self.on_stats: Callable[[EngineStats], None] = lambda stats: None
        self.failure: EngineDeadError | None = None
        """Why no request can be served any more; None while the engine lives."""
        self._streams: dict[RequestId, RequestStream] = {}
        self._calls: dict[int, asyncio.Future[UtilityResult]] = {}
        self._call_ids = itertools.count()
        self._closing: asyncio.Task[None] | None = None
        self._welcome: asyncio.Future[EngineFacts] = asyncio.get_running_loop().create_future()
        self._requests = request_codec()
        self._event_codec = event_codec()
        self._malformed = LimitedLog(logger)
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close()
            raise StartupError(
                f"cannot connect to {address!r}: {error.strerror}",
                phase="connecting",
                hint="an address looks like ipc:///run/engine/core",
            ) from error
        self._zmq_socket = socket
        self._socket = LoopSocket(socket, self._receive, self._break_down)
        self._monitor = LoopSocket(monitor, self._on_connection_event, self._break_down)

    @classmethod
    async def connect(cls, context: "zmq.Context[zmq.Socket[bytes]]", address: str, timeout_s: float) -> "CoreLink":
        """Connect to the core that listens on `address`.

        Raises:
            StartupError: nobody answers there, or it speaks another version of the protocol.
            EngineDeadError: it ended before it answered.
        """
        link = cls(context, address)
        try:
            program = os.path.basename(sys.argv[0]).encode(errors="replace").decode() or "python"
            link._post(Connect(client=f"{program} pid={os.getpid()}"))
            link.facts = await asyncio.wait_for(asyncio.shield(link._welcome), timeout_s)
        except TimeoutError:
            await link.close()
            raise StartupError(
                f"no engine answers on {address}",
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

    def teach(self, vocabulary: Vocabulary) -> None:
        """Tell the core what tokens stand for, before the first request with a grammar.

        Raises:
            InvalidRequestError: it has no place in a message.
        """
        self._post(vocabulary)

    def submit(self, submit: Submit, arrived: Wakeable) -> RequestStream:
        """Send a request and return its stream.

        Args:
            submit: the request.
            arrived: set whenever the stream has something to take; several streams may share one.

        Raises:
            EngineDeadError: the engine is gone.
            InvalidRequestError: a live request has the same id, or a value has no place in a message.
        """
        if self.failure:
            raise self.failure
        if submit.request_id in self._streams:
            raise InvalidRequestError(f"request_id {submit.request_id!r} is in use", "request_id")
        self._post(submit)
        stream = RequestStream(submit.request_id, arrived)
        self._streams[submit.request_id] = stream
        return stream

    def abort(self, request_ids: list[RequestId]) -> None:
        """Stop requests and forget them: their streams get nothing more."""
        live = [request_id for request_id in request_ids if self._streams.pop(request_id, None)]
        if live and not self.failure:
            self._post(Abort(live))

    async def call(self, utility: Utility, timeout_s: float = 60.0) -> UtilityResult:
        """Make a utility call.

        Raises:
            EngineDeadError: the engine is gone.
            InvalidRequestError: a value has no place in a message.
            RequestFailedError: the call failed, or was not answered in time.
        """
        if self.failure:
            raise self.failure
        call_id = next(self._call_ids)
        self._post(Call(call_id, utility))
        future: asyncio.Future[UtilityResult] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            result = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise RequestFailedError(f"the engine did not answer within {timeout_s:.0f} s") from None
        finally:
            self._calls.pop(call_id, None)
        if isinstance(result, CallFailed):
            raise RequestFailedError(result.message)
        return result

    def fail(self, cause: str) -> None:
        """Mark the engine as gone: every live request and call ends with the first cause given."""
        if self.failure:
            return
        self.failure = EngineDeadError(cause)
        for stream in self._streams.values():
            stream.fail(self.failure)
        self._streams.clear()
        pending: list[asyncio.Future[Any]] = [self._welcome, *self._calls.values()]
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
        if not self.failure:
            if self._streams:
                self._post(Abort(list(self._streams)))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._socket.drain(), 1.0)
        self.fail("the connection to the engine was closed")
        if not self._zmq_socket.closed:  # else the whole context was destroyed meanwhile
            self._zmq_socket.disable_monitor()
        self._monitor.close(linger_ms=0)
        self._socket.close()

    def _break_down(self, error: Exception) -> None:
        """End every request: what came in could not be handled, and what it was for would wait for ever."""
        self.fail(f"the link to the engine broke: {type(error).__name__}: {error}")

    def _post(self, request: Request) -> None:
        """Queue a message, unless the core could not read it: it would drop it, and nobody would ever answer.

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
        self._socket.send([frame])

    def _receive(self, frames: list[bytes]) -> None:
        try:
            event = self._event_codec.decode(only_frame(frames))
        except ProtocolError as error:
            self._malformed.warning("dropped a message from the engine: %s", error)
        else:
            self._dispatch(event)

    def _on_connection_event(self, frames: list[bytes]) -> None:
        """Notice a core that is gone without a word."""
        event = zmq.utils.monitor.parse_monitor_message(frames)
        if event["event"] == zmq.EVENT_DISCONNECTED:
            # Its last words, if it had any, lie in the receive queue.
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self.fail, "the engine's core process is gone")

    def _dispatch(self, event: Event) -> None:
        match event:
            case Events():
                self._deliver(event)
            case StatsReport():
                self.latest_stats = event.stats
                self.on_stats(event.stats)
            case Reply():
                if (future := self._calls.get(event.call_id)) and not future.done():
                    future.set_result(event.result)
            case Welcome():
                if not self._welcome.done():
                    self._welcome.set_result(event.facts)
            case Refused():
                if not self._welcome.done():
                    self._welcome.set_exception(StartupError(event.message, phase="connecting"))
                else:  # the core has given this frontend up: it did not read its events
                    self.fail(f"the engine has ended the connection: {event.message}")
            case EngineDying():
                self.fail(event.message or "the engine was shut down")

    def _deliver(self, events: Events) -> None:
        if events.epoch != self.facts.epoch:
            return
        for event in events.events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue  # aborted here while the event was on its way
            stream.put(event)
            if stream.is_over:
                del self._streams[event.request_id]
