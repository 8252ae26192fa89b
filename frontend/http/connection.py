"""`Connection`: uvicorn's HTTP/1.1 connection with bounds on what a caller may send or omit before there is a request.

Everything else about HTTP is uvicorn's.
"""

import asyncio
from http import HTTPStatus

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from octavo.frontend.http.acceptor import is_probe
from octavo.frontend.http.errors import refusal
from octavo.frontend.http.pace import Pace

FIRST_REQUEST_S = 60
"""What a new connection is kept open for while nothing comes."""

UNFINISHED_S = 60
"""What a head, or any other part that is kept until it is complete, may take to come; and the next bytes of a body."""

UNREAD_S = 60
"""What a caller gets to take at least a byte of what waits to be sent."""

LAST_WORD_S = 1
"""What a refused caller gets to read why."""

_OFFERS = (b"upgrade", b"http2-settings")
"""Headers of an offer, which `connection` names too."""


class Connection(HttpToolsProtocol):
    """Refuses a head, or any other part that is kept until it is complete, above the configured length or time.

    The length is uvicorn's `h11_max_incomplete_event_size`, which its connections on httptools do not look at.
    """

    _num_kept_bytes = 0
    """Received since the parser last gave something away."""
    _is_in_message = False
    """A head has come, and not yet all of its body."""
    _patience: asyncio.TimerHandle | None = None
    """Runs while something is kept, or a body has not come to its end."""
    _reading: asyncio.TimerHandle | None = None
    """Runs while the caller may not have read all that there is."""
    _is_refused = False
    _is_offered = False
    """The head that was read last offers another protocol; the request has not begun."""

    _num_queued = 0
    """Pieces received that wait for their turn."""
    _ends_soon = False
    """The server ends, and waits for what is queued."""

    def __init__(self, config: uvicorn.Config, server_state: ServerState, pace: Pace) -> None:
        """Make a connection that takes up its requests at a pace common to all."""
        super().__init__(config, server_state, app_state={})
        self._pace = pace

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request, but not for ever."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(FIRST_REQUEST_S, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        """Take up what came when its turn is, that of a probe at once; read little more from this caller until then."""
        self._unset_keepalive_if_required()
        if not self._num_queued and is_probe(data):
            self._take(data)
            return
        self._num_queued += 1
        self._pace.do(lambda: self._take_queued(data))
        if self._num_queued > 1:
            self.transport.pause_reading()

    def shutdown(self) -> None:
        """End after the requests that have come, those included that wait for their turn."""
        if self._num_queued:
            self._ends_soon = True
        else:
            super().shutdown()

    def _take_queued(self, data: bytes) -> None:
        self._num_queued -= 1
        if self.parser is None:  # the connection is lost
            return
        self._take(data)
        if self._ends_soon:
            self.shutdown()
        if not (self._num_queued or self.flow.read_paused or self.transport.is_closing()):
            self.transport.resume_reading()

    def _take(self, data: bytes) -> None:
        """Feed the parser, and see how much it keeps."""
        if self._is_refused:
            return
        self._num_kept_bytes += len(data)
        self._feed(data)
        if self._num_kept_bytes > self._max_bytes:
            self._refuse()
        elif self._num_kept_bytes or self._is_in_message:
            self._be_patient()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        super().connection_lost(exc)
        self._keep_nothing()
        self._forget_reader()

    def pause_writing(self) -> None:
        """Wait until the caller has read, but not for ever: its request holds memory, and may hold blocks."""
        super().pause_writing()
        self._forget_reader()
        self._watch_reader()

    def on_response_complete(self) -> None:
        """Go on with the next request; what the caller has not read of this answer must not stay for ever."""
        super().on_response_complete()
        self._watch_reader()

    def on_headers_complete(self) -> None:
        """Go on with a head of an allowed length; it may have come in one piece with what follows."""
        self._keep_nothing()
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > self._max_bytes:
            self._refuse()
        elif self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._is_offered = True  # the parser stops behind this head, see `_feed`
        elif not self._is_refused:
            self._is_in_message = True
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, unless the head was refused."""
        self._keep_nothing()
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request, unless its head was refused."""
        self._is_in_message = False
        self._keep_nothing()
        if not (self._is_refused or self._is_offered):
            super().on_message_complete()
            if self.cycle.response_complete and self.timeout_keep_alive_task is None:
                # Answered by its head alone; what came of its body has ended the wait for the next request.
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

    def _feed(self, data: bytes) -> None:
        """Have the parser read what came.

        A head may offer another protocol, as some clients offer HTTP/2 each time, and a server may pass over that
        (RFC 9110, 7.8). The parser however takes no body for part of such a request: so it is read again as one
        without the offer.
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
                if not self._is_offered:  # CONNECT: what follows is for somebody else
                    return
                self._is_offered = False
                data = self._head_without_offer() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)

    def _head_without_offer(self) -> bytes:
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                words = [word.strip() for word in value.split(b",")]
                value = b", ".join(word for word in words if word.lower() not in _OFFERS)
            if name not in _OFFERS:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def _be_patient(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(UNFINISHED_S, self._lose_patience)

    def _lose_patience(self) -> None:
        """Leave, unless a whole request is being answered and what came behind it can wait."""
        self._patience = None
        if self.parser is None:  # the connection is lost
            return
        if self._is_in_message and self.flow.read_paused:  # it is not the caller who does not go on
            self._be_patient()
        elif self._is_in_message or self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _watch_reader(self) -> None:
        if self._reading is None and (num_bytes := self.transport.get_write_buffer_size()):
            self._reading = self.loop.call_later(UNREAD_S, self._look_at_reader, num_bytes, self.cycle)

    def _look_at_reader(self, num_bytes_before: int, cycle_before: RequestResponseCycle | None) -> None:
        """Leave a caller who has taken nothing since then, which the length of what waits tells while none is added."""
        self._reading = None
        is_answering = self.cycle is not None and not self.cycle.response_complete
        may_have_grown = self.cycle is not cycle_before or (is_answering and not self.flow.write_paused)
        if self.transport.get_write_buffer_size() < num_bytes_before or may_have_grown:
            self._watch_reader()
        else:
            self.logger.warning("a caller has read nothing for %d s: its connection is closed", UNREAD_S)
            self.transport.abort()

    def _forget_reader(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _keep_nothing(self) -> None:
        self._num_kept_bytes = 0
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    @property
    def _max_bytes(self) -> int:
        return self.config.h11_max_incomplete_event_size or 0

    def _refuse(self) -> None:
        """Say so, unless that would stand in the middle of the answer to an earlier request, and close."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        if self.cycle is None or self.cycle.response_complete:
            limit = f"{self._max_bytes} bytes, which is the limit (--max-request-head-bytes)"
            self._write_refusal(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the head of the request is larger than {limit}"
            )
            # Closed at once, with a part of the head unread, the caller would hear of a broken connection instead.
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self.loop.call_later(LAST_WORD_S, self.transport.close)
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP in the form of every error, unless that would stand in the middle of an answer."""
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
