"""`HttpProtocol`: uvicorn's HTTP/1.1 connection with limits on request heads, idle time and unread responses.

uvicorn implements the rest of HTTP.
"""

import asyncio
from http import HTTPStatus

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from octavo.frontend.http.acceptor import is_probe
from octavo.frontend.http.disconnect import MessageEvent
from octavo.frontend.http.errors import refusal
from octavo.frontend.http.throttle import Throttle

FIRST_REQUEST_S = 60
"""How long a new connection may stay silent."""

UNFINISHED_S = 60
"""Time limit for a complete request head or other buffered part, and between two pieces of a body."""

UNREAD_S = 60
"""Time within which a client must read at least one byte of the unsent response."""

ERROR_RESPONSE_S = 1
"""Time a rejected client gets to read the error response."""

_UPGRADE_HEADERS = (b"upgrade", b"http2-settings")
"""Headers of an upgrade offer; `connection` lists them too."""


class HttpProtocol(HttpToolsProtocol):
    """Rejects request heads and other buffered parts that exceed the configured length or time.

    The length limit is uvicorn's `h11_max_incomplete_event_size`, which its httptools connections ignore.
    """

    # With more attributes than share their keys, each connection's dictionary would take 1.5 KB.
    __slots__ = (
        "_disconnects",
        "_is_in_message",
        "_is_refused",
        "_is_shutdown_pending",
        "_is_upgrade_offered",
        "_num_kept_bytes",
        "_num_queued",
        "_throttle",
        "_unfinished_timer",
        "_unread_timer",
    )

    def __init__(
        self, config: uvicorn.Config, server_state: ServerState, throttle: Throttle, disconnects: Throttle
    ) -> None:
        """Create a connection. All connections share a throttle for requests and one for disconnects."""
        super().__init__(config, server_state, app_state={})
        self._throttle = throttle
        self._disconnects = disconnects
        self._num_kept_bytes = 0
        """Bytes received since the parser last called back; it buffers these."""
        self._is_in_message = False
        """The head is complete, the body is not."""
        self._unfinished_timer: asyncio.TimerHandle | None = None
        """Runs while the parser buffers a part or a body is incomplete."""
        self._unread_timer: asyncio.TimerHandle | None = None
        """Runs while the client may have left data unread."""
        self._is_refused = False
        self._is_upgrade_offered = False
        """The last head offers an upgrade; it is parsed again without the offer, see `_feed`."""
        self._num_queued = 0
        """Received pieces that wait in the throttle."""
        self._is_shutdown_pending = False
        """The server shuts down once the queued pieces are handled."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout for the first request."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(FIRST_REQUEST_S, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        """Queue the data in the throttle and pause reading; handle a health probe at once."""
        self._unset_keepalive_if_required()
        if not self._num_queued and is_probe(data):
            self._handle(data)
            return
        self._num_queued += 1
        self._throttle.run(lambda: self._handle_queued(data))
        if self._num_queued > 1:
            self.transport.pause_reading()

    def shutdown(self) -> None:
        """Shut down after all received requests, including those queued in the throttle."""
        if self._num_queued:
            self._is_shutdown_pending = True
        else:
            super().shutdown()

    def _handle_queued(self, data: bytes) -> None:
        self._num_queued -= 1
        if self.parser is None:  # the connection is lost
            return
        self._handle(data)
        if self._is_shutdown_pending:
            self.shutdown()
        if not (self._num_queued or self.flow.read_paused or self.transport.is_closing()):
            self.transport.resume_reading()

    def _handle(self, data: bytes) -> None:
        """Feed the parser, and check how many bytes it buffers."""
        if self._is_refused:
            return
        self._num_kept_bytes += len(data)
        self._feed(data)
        if self._num_kept_bytes > self._max_bytes:
            self._refuse()
        elif self._num_kept_bytes or self._is_in_message:
            self._start_unfinished_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers; end the current request through the throttle.

        Thousands of clients may disconnect at once, and each disconnect wakes tasks.
        """
        self._reset_unfinished()
        self._stop_unread_timer()
        if self.cycle is None or self.cycle.response_complete:
            super().connection_lost(exc)
            return
        self.cycle.disconnected = True
        self.parser = None  # type: ignore[assignment]
        self._disconnects.run(lambda: super(HttpProtocol, self).connection_lost(exc))

    def pause_writing(self) -> None:
        """Start the timeout for reading: the request of a slow client holds memory, and possibly KV blocks."""
        super().pause_writing()
        self._stop_unread_timer()
        self._start_unread_timer()

    def on_response_complete(self) -> None:
        """Continue with the next request; start the timeout for the unread rest of this response."""
        super().on_response_complete()
        self._start_unread_timer()

    def on_headers_complete(self) -> None:
        """Accept or reject the head. It may have arrived together with the data after it."""
        self._reset_unfinished()
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > self._max_bytes:
            self._refuse()
        elif self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._is_upgrade_offered = True  # the parser stops after this head, see `_feed`
        elif not self._is_refused:
            self._is_in_message = True
            super().on_headers_complete()
            self.cycle.message_event = MessageEvent()  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body, unless the head was rejected."""
        self._reset_unfinished()
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Complete the request, unless its head was rejected."""
        self._is_in_message = False
        self._reset_unfinished()
        if not (self._is_refused or self._is_upgrade_offered):
            super().on_message_complete()
            self.headers = []  # the scope has them, and drops them where the rest of a request may wait for long
            if self.cycle.response_complete and self.timeout_keep_alive_task is None:
                # The response was complete before the body, and the body's data cancelled the keep-alive timeout.
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

    def _feed(self, data: bytes) -> None:
        """Feed the parser.

        A head may offer an upgrade, as some clients offer HTTP/2 every time, and a server may ignore it (RFC 9110,
        7.8). The parser does not accept a body in such a request, so the request is parsed again without the offer.
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
        """Close the connection, unless a complete request is being answered and the rest can wait."""
        self._unfinished_timer = None
        if self.parser is None:  # the connection is lost
            return
        if self._is_in_message and self.flow.read_paused:  # we paused reading, the client is not at fault
            self._start_unfinished_timer()
        elif self._is_in_message or self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _start_unread_timer(self) -> None:
        if self._unread_timer is None and (num_bytes := self.transport.get_write_buffer_size()):
            self._unread_timer = self.loop.call_later(UNREAD_S, self._check_unread, num_bytes, self.cycle)

    def _check_unread(self, num_bytes_before: int, cycle_before: RequestResponseCycle | None) -> None:
        """Close the connection if the client read nothing: the write buffer did not shrink and nothing was added."""
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

    def _refuse(self) -> None:
        """Send an error response, unless an earlier response is being sent, and close."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        if self.cycle is None or self.cycle.response_complete:
            limit = f"{self._max_bytes} bytes, which is the limit (--max-request-head-bytes)"
            self._write_refusal(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the head of the request is larger than {limit}"
            )
            # Closing at once with unread data would reset the connection before the client reads the response.
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self.loop.call_later(ERROR_RESPONSE_S, self.transport.close)
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with a JSON error like all others, unless a response is being sent."""
        cycle = self.cycle
        is_in_body = cycle is not None and cycle.more_body and not cycle.response_started
        if cycle is None or cycle.response_complete or is_in_body:
            self._write_refusal(HTTPStatus.BAD_REQUEST, "the request is not valid HTTP/1.1")
        self.transport.close()

    def _write_refusal(self, status: HTTPStatus, message: str) -> None:
        body = refusal(status, message).body
        lines = [*self.server_state.default_headers, (b"content-type", b"application/json")]
        lines += [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        head = b"".join([b"%b: %b\r\n" % line for line in lines])
        self.transport.write(STATUS_LINE[status] + head + b"\r\n" + body)
