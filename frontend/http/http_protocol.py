"""`HttpProtocol`: uvicorn's HTTP/1.1 connection, with limits on request heads, idle time and unread responses.

uvicorn implements the rest of HTTP.
"""

import asyncio
import socket
from http import HTTPStatus
from typing import TYPE_CHECKING

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from octavo.frontend.http.acceptor import FIRST_REQUEST_S
from octavo.frontend.http.disconnect import MessageEvent
from octavo.frontend.http.errors import rejection
from octavo.frontend.http.throttle import Throttle, first_bytes, is_probe

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

UNFINISHED_S = 60
"""Seconds for a complete request head or other buffered part, and between two parts of a body."""

UNREAD_S = 60
"""Seconds within which a client must read at least one byte of the unsent response."""

ERROR_RESPONSE_S = 1
"""Seconds that a rejected client gets to read the error response."""

_UPGRADE_HEADERS = (b"upgrade", b"http2-settings")
"""Headers that offer an upgrade; `connection` lists them too."""


class _ThrottledFlow(FlowControl):
    """Flow control of a connection that reads only when the throttle lets it. The transport pauses after each read.

    It must not refer to the protocol: with a cycle, every connection would wait for the garbage collector.
    """

    def __init__(self, transport: asyncio.Transport, client_socket: socket.socket, throttle: Throttle | None) -> None:
        super().__init__(transport)
        self._client_socket = client_socket
        self._throttle = throttle

    def pause_reading(self) -> None:
        self.read_paused = True

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self.read_next()

    def read_next(self) -> None:
        """Resume reading when data have arrived and the throttle allows it; without a throttle, at once."""
        if self._transport.is_closing():
            return
        if self._throttle is None:
            self._transport.resume_reading()
        else:
            self._throttle.watch(self._client_socket, self._transport.resume_reading)


async def _run(cycle: RequestResponseCycle, app: "ASGI3Application") -> None:
    """Handle a request.

    The scope refers to the cycle's own methods. If the cycle kept the scope, every request would wait for the garbage
    collector, which would take half a second after a flood.
    """
    try:
        await cycle.run_asgi(app)
    finally:
        cycle.scope = {}  # type: ignore[typeddict-item]


class HttpProtocol(HttpToolsProtocol):
    """Rejects request heads and other buffered parts that exceed the configured length or time.

    The length limit is uvicorn's `h11_max_incomplete_event_size`, which its httptools connections ignore.
    """

    # With more attributes than a shared-key dictionary allows, each connection's dictionary would take 1.5 KB.
    __slots__ = (
        "_client_socket",
        "_is_encrypted",
        "_is_in_message",
        "_is_queued",
        "_is_rejected",
        "_is_shutdown_pending",
        "_is_upgrade_offered",
        "_num_kept_bytes",
        "_running",
        "_throttle",
        "_unfinished_timer",
        "_unread_timer",
    )

    def __init__(
        self, config: uvicorn.Config, server_state: ServerState, client_socket: socket.socket, throttle: Throttle
    ) -> None:
        """Create a connection from its socket and the throttle that all connections share."""
        super().__init__(config, server_state, app_state={})
        self._client_socket = client_socket
        self._throttle = throttle
        self._is_encrypted = False
        self._running: RequestResponseCycle | None = None
        """The latest request that was started; `cycle` is the latest that has arrived."""
        self._num_kept_bytes = 0
        """Bytes received since the parser last called back. The parser buffers these."""
        self._is_in_message = False
        """Whether the head is complete and the body is not."""
        self._unfinished_timer: asyncio.TimerHandle | None = None
        """Runs while the parser buffers a part or a body is incomplete."""
        self._unread_timer: asyncio.TimerHandle | None = None
        """Runs while the client may have left data unread."""
        self._is_rejected = False
        self._is_upgrade_offered = False
        """Whether the last head offers an upgrade. It is parsed again without the offer, see `_feed`."""
        self._is_queued = False
        """Whether received data wait for the throttle."""
        self._is_shutdown_pending = False
        """Whether the server is shutting down. The connection then closes after handling what has arrived."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout for the first request."""
        super().connection_made(transport)
        self._is_encrypted = self.scheme == "https"
        self.flow: _ThrottledFlow = _ThrottledFlow(
            transport, self._client_socket, None if self._is_encrypted else self._throttle
        )
        self.timeout_keep_alive_task = self.loop.call_later(FIRST_REQUEST_S, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        """Handle the data, and pause reading until the throttle lets this connection read again.

        asyncio decrypts a TLS connection as soon as data arrive, so the throttle applies only here.
        """
        self._unset_keepalive_if_required()
        self.transport.pause_reading()
        if self._is_encrypted and not is_probe(data):
            self._is_queued = True
            self._throttle.run(lambda: self._handle_in_turn(data))
        else:
            self._handle_in_turn(data)

    def shutdown(self) -> None:
        """Shut down after all requests that have arrived are handled."""
        if self._has_unread_data:
            self._is_shutdown_pending = True
        else:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection, unless a request has arrived and waits for the throttle."""
        if not self._has_unread_data:
            super().timeout_keep_alive_handler()

    @property
    def _has_unread_data(self) -> bool:
        """Return whether data have arrived that will be handled in this connection's next turn."""
        return self._is_queued or (not self.flow.read_paused and bool(first_bytes(self._client_socket)))

    def _handle_in_turn(self, data: bytes) -> None:
        self._is_queued = False
        if self.parser is None:  # the connection is lost
            return
        self._handle(data)
        if not self.flow.read_paused:
            self.flow.read_next()
        if self._is_shutdown_pending:
            self.shutdown()

    def _handle(self, data: bytes) -> None:
        """Feed the parser, and check how many bytes it buffers."""
        if self._is_rejected:
            return
        self._num_kept_bytes += len(data)
        self._feed(data)
        if self._num_kept_bytes > self._max_bytes:
            self._reject()
        elif self._num_kept_bytes or self._is_in_message:
            self._start_unfinished_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers and end the current request, which wakes tasks; with TLS, when the throttle allows."""
        self._throttle.forget(self._client_socket)
        self._reset_unfinished()
        self._stop_unread_timer()
        if not self._is_encrypted or self.cycle is None or self.cycle.response_complete:
            self._end(exc)
            return
        self.cycle.disconnected = True
        self.parser = None  # type: ignore[assignment]
        self._throttle.run(lambda: self._end(exc))

    def pause_writing(self) -> None:
        """Start the timeout for reading: a slow client's request holds memory, and possibly KV blocks."""
        super().pause_writing()
        self._stop_unread_timer()
        self._start_unread_timer()

    def on_response_complete(self) -> None:
        """Continue with the next request; start the timeout for the unread rest of this response."""
        super().on_response_complete()
        self._start_unread_timer()

    def on_headers_complete(self) -> None:
        """Accept or reject the head, which may have arrived together with later data."""
        self._reset_unfinished()
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > self._max_bytes:
            self._reject()
        elif self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._is_upgrade_offered = True  # the parser stops after this head, see `_feed`
        elif not self._is_rejected:
            self._is_in_message = True
            super().on_headers_complete()
            self.cycle.message_event = MessageEvent()  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body, unless the head was rejected."""
        self._reset_unfinished()
        if not self._is_rejected:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Complete the request, unless its head was rejected."""
        self._is_in_message = False
        self._reset_unfinished()
        if not (self._is_rejected or self._is_upgrade_offered):
            super().on_message_complete()
            self.headers = []  # the scope has them, and drops them where a request may wait for long
            if self.cycle.response_complete and self.timeout_keep_alive_task is None:
                # The response was complete before the body, whose data cancelled the keep-alive timeout.
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

    def _end(self, exc: Exception | None) -> None:
        """End the requests. uvicorn would let one run to its end if others have arrived behind it."""
        super().connection_lost(exc)
        running = self._running
        if running is not None and running is not self.cycle and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: "ASGI3Application") -> None:
        self._running = cycle
        task = self.loop.create_task(_run(cycle, app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _feed(self, data: bytes) -> None:
        """Feed the parser.

        A head may offer an upgrade: some clients offer HTTP/2 every time. A server may ignore the offer (RFC 9110,
        7.8), but the parser accepts no body in such a request. So the request is parsed again without the offer.
        """
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserError:
                self.logger.warning("Invalid HTTP request received.")
                self.send_400_response("")
                return
            except httptools.HttpParserUpgrade as offer:
                if not self._is_upgrade_offered:  # CONNECT: the data that follows is not HTTP
                    return
                self._is_upgrade_offered = False
                data = self._head_without_offer() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)

    def _head_without_offer(self) -> bytes:
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(option for option in options if option.lower() not in _UPGRADE_HEADERS)
            if name not in _UPGRADE_HEADERS:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def _start_unfinished_timer(self) -> None:
        if self._unfinished_timer is None:
            self._unfinished_timer = self.loop.call_later(UNFINISHED_S, self._on_unfinished_timeout)

    def _on_unfinished_timeout(self) -> None:
        """Close the connection, unless a complete request is being handled and the rest can wait."""
        self._unfinished_timer = None
        if self.parser is None:  # the connection is lost
            return
        is_paused = self._is_in_message and self.flow.read_paused
        if is_paused or self._has_unread_data:  # we have not read, so the client is not at fault
            self._start_unfinished_timer()
        elif self._is_in_message or self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _start_unread_timer(self) -> None:
        if self._unread_timer is None and (num_bytes := self.transport.get_write_buffer_size()):
            self._unread_timer = self.loop.call_later(UNREAD_S, self._check_unread, num_bytes, self.cycle)

    def _check_unread(self, num_bytes_before: int, cycle_before: RequestResponseCycle | None) -> None:
        """Close the connection if the client read nothing: the write buffer neither shrank nor got new data."""
        self._unread_timer = None
        is_answering = self.cycle is not None and not self.cycle.response_complete
        may_have_grown = self.cycle is not cycle_before or (is_answering and not self.flow.write_paused)
        if self.transport.get_write_buffer_size() < num_bytes_before or may_have_grown:
            self._start_unread_timer()
        else:
            self.logger.warning("closing a connection: the client has read nothing for %d s", UNREAD_S)
            self.transport.abort()

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _reset_unfinished(self) -> None:
        self._num_kept_bytes = 0
        if self._unfinished_timer is not None:
            self._unfinished_timer.cancel()
            self._unfinished_timer = None

    @property
    def _max_bytes(self) -> int:
        return self.config.h11_max_incomplete_event_size or 0

    def _reject(self) -> None:
        """Send an error response, unless an earlier response is being sent, and close the connection."""
        if self._is_rejected or self.transport.is_closing():
            return
        self._is_rejected = True
        if self.cycle is None or self.cycle.response_complete:
            limit = f"{self._max_bytes} bytes, which is the limit (--max-request-head-bytes)"
            self._write_rejection(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the head of the request is larger than {limit}"
            )
            # Closing now, with unread data, would reset the connection before the client reads the response.
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self.loop.call_later(ERROR_RESPONSE_S, self.transport.close)
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Respond to invalid HTTP with a JSON error as everywhere, unless a response is being sent."""
        cycle = self.cycle
        is_in_body = cycle is not None and cycle.more_body and not cycle.response_started
        if cycle is None or cycle.response_complete or is_in_body:
            self._write_rejection(HTTPStatus.BAD_REQUEST, "the request is not valid HTTP/1.1")
        self.transport.close()

    def _write_rejection(self, status: HTTPStatus, message: str) -> None:
        body = rejection(status, message).body
        lines = [*self.server_state.default_headers, (b"content-type", b"application/json")]
        lines += [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        head = b"".join([b"%b: %b\r\n" % line for line in lines])
        self.transport.write(STATUS_LINE[status] + head + b"\r\n" + body)
