"""One client's connection: bytes to requests, responses to bytes, in order. Knows no route.

HTTP/1.1 as RFC 9112 has it, with keep-alive, pipelining and chunked bodies; parsed by httptools, which is the
parser of Node.js. A caller who leaves cancels the work on the request.
"""

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from email.utils import formatdate
from typing import Protocol
from urllib.parse import unquote_to_bytes

import httptools

from octavo.frontend.http.errors import error_response, refusal
from octavo.frontend.http.message import Request, Response, StreamedResponse
from octavo.protocol.errors import OctavoError

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 2**10
"""Of one request: its target and its headers. What one read brings may go beyond it."""

MAX_BODY_BYTES = 64 * 2**20

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE = b"connection: close\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class Application(Protocol):
    """What answers the requests."""

    def screen(self, request: Request) -> Response | None:
        """Return the answer to a request that its head already refuses; else its body is read."""

    async def answer(self, request: Request) -> Response:
        """Return the answer to a request."""

    def failure(self, request: Request, error: Exception) -> Response:
        """Return the answer to a request whose streamed answer failed before its first piece."""


@dataclass(slots=True)
class Exchange:
    """A request and what is to be kept in mind for its response."""

    request: Request
    keeps_alive: bool
    has_chunks: bool
    """The caller understands chunks; else the end of the connection ends the body."""
    refusal: Response | None = None
    """Answers the request without asking the application."""
    has_head: bool = False
    """Status and headers of the response have been sent."""


class Connection(asyncio.Protocol):
    """Handles one request after the other.

    Args:
        app: what answers them.
        open_connections: this one is a member from its first byte to its last.
        has_access_log: write a line per response.
    """

    def __init__(self, app: Application, open_connections: "set[Connection]", *, has_access_log: bool) -> None:
        self.idle_since: float | None = time.monotonic()
        """When it last became idle; None while a request is being read or answered."""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection is gone."""
        self._app = app
        self._open_connections = open_connections
        self._has_access_log = has_access_log
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._is_in_head = False
        self._num_head_bytes = 0
        """Of a head that is not complete yet; the parser itself would take any length."""
        self._exchange: Exchange | None = None
        """The request that is being read."""
        self._body: list[bytes] = []
        self._num_body_bytes = 0
        self._waiting: deque[Exchange] = deque()
        """Read, but not answered: more than one only if the caller does not wait for answers."""
        self._task: asyncio.Task[None] | None = None
        self._output: list[bytes] = []
        """Sent together in the next turn of the loop: every write is a system call, and wakes the caller."""
        self._has_flush = False
        """That turn is scheduled."""
        self._can_write: asyncio.Event | None = None
        """There while the caller reads too slowly."""
        self._is_closing = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        self._transport = transport
        self._open_connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop working for a caller who has left."""
        self._open_connections.discard(self)
        self.closed.set_result(None)
        self._is_closing = True
        self._waiting.clear()
        if self._task:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        """Read what has come."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # the request itself is answered as any other, and nothing is read after it
        except httptools.HttpParserError:
            self._refuse_to_read(400, "this is not HTTP as RFC 9112 has it")
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse_to_read(431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes")

    def pause_writing(self) -> None:
        """Stop streams: the caller reads too slowly."""
        self._can_write = asyncio.Event()

    def resume_writing(self) -> None:
        """Let streams go on."""
        if self._can_write:
            self._can_write.set()
            self._can_write = None

    def shut_down(self) -> None:
        """Take no further request: close now if idle, else after the response."""
        self._is_closing = True
        if self._task is None:
            self._transport.close()

    def abort(self) -> None:
        """Close now, whatever has not been sent."""
        self._transport.abort()

    # What the parser calls.

    def on_message_begin(self) -> None:
        """A request begins."""
        self.idle_since = None
        self._url = b""
        self._headers = {}
        self._is_in_head = True
        self._num_head_bytes = self._num_body_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Part of the target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._headers.setdefault(name.lower(), value)

    def on_headers_complete(self) -> None:
        """Decide what is to become of the request as far as its head can tell."""
        self._is_in_head = False
        parser = self._parser
        is_1_1 = parser.get_http_version() == "1.1"
        request = Request(parser.get_method().decode("ascii"), _path(self._url), self._headers)
        keeps_alive = is_1_1 and parser.should_keep_alive() and not parser.should_upgrade()
        self._exchange = exchange = Exchange(request, keeps_alive, is_1_1, self._app.screen(request))
        length = self._headers.get(b"content-length", b"0")
        if exchange.refusal is None and length.isdigit() and int(length) > MAX_BODY_BYTES:
            exchange.refusal = _too_large()
        if exchange.refusal is None and is_1_1 and self._headers.get(b"expect", b"").lower() == b"100-continue":
            self._transport.write(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        """Part of the body; that of a refused request is read and dropped."""
        exchange = self._exchange
        assert exchange is not None
        self._num_body_bytes += len(body)
        if exchange.refusal is None and self._num_body_bytes > MAX_BODY_BYTES:
            exchange.refusal = _too_large()
            self._body.clear()
        if exchange.refusal is None:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """The request is there: answer it, or let it wait for the one before."""
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        exchange.request.body = b"".join(self._body)
        self._body.clear()
        self._waiting.append(exchange)
        if self._task:
            self._transport.pause_reading()  # until the requests before it have been answered
        else:
            self._begin_next()

    # Answering.

    def _refuse_to_read(self, status: int, why: str) -> None:
        """Answer what was read before, then say why nothing more is read."""
        self._is_in_head = False
        self._transport.pause_reading()
        refused = Exchange(Request("", "", {}), keeps_alive=False, has_chunks=True, refusal=refusal(status, why))
        self._waiting.append(refused)
        self._begin_next()

    def _begin_next(self) -> None:
        """Work on the next request, or wait for one."""
        while self._waiting and self._task is None and not self._transport.is_closing():
            exchange = self._waiting.popleft()
            if exchange.refusal is not None:
                self._send(exchange, exchange.refusal)
                self._finish(exchange)
            else:
                self._task = self._loop.create_task(self._work(exchange))
                self._task.add_done_callback(_log_failure)
        if self._task is None and not self._transport.is_closing():
            self.idle_since = time.monotonic()
            self._transport.resume_reading()

    async def _work(self, exchange: Exchange) -> None:
        try:
            response = await self._app.answer(exchange.request)
            if isinstance(response, StreamedResponse):
                await self._send_stream(exchange, response)
            else:
                self._send(exchange, response)
        except Exception as error:
            if not exchange.has_head:
                self._send(exchange, error_response(error))
            elif exchange.has_chunks:  # a stream, which has told its caller
                self._output.append(_LAST_CHUNK)
            raise
        finally:
            self._task = None
            self._finish(exchange)
            self._begin_next()

    async def _send_stream(self, exchange: Exchange, response: StreamedResponse) -> None:
        pieces = response.pieces()
        try:
            async for piece in pieces:
                if not exchange.has_head:
                    exchange.keeps_alive &= exchange.has_chunks
                    self._send_head(exchange, response, _CHUNKED if exchange.has_chunks else b"")
                self._send_piece(exchange, piece)
                if self._can_write:
                    await self._can_write.wait()
        except OctavoError as error:
            if exchange.has_head:
                raise
            self._send(exchange, self._app.failure(exchange.request, error))
            return
        finally:
            # Not left to the garbage collector: the engine must hear now that nobody listens.
            await pieces.aclose()
        if exchange.has_chunks:
            self._output.append(_LAST_CHUNK)

    def _send(self, exchange: Exchange, response: Response) -> None:
        self._send_head(exchange, response, b"content-length: %d\r\n" % len(response.body))
        if exchange.request.method != "HEAD":
            self._output.append(response.body)

    def _send_head(self, exchange: Exchange, response: Response, length: bytes) -> None:
        if self._has_access_log:
            request = exchange.request
            caller = self._transport.get_extra_info("peername") or "unix"
            logger.info('%s - "%s %s" %d', caller, request.method, request.path, response.status)
        exchange.has_head = True
        exchange.keeps_alive &= not self._is_closing
        self._output.append(response.head(length, _date_line(), b"" if exchange.keeps_alive else _CLOSE))

    def _send_piece(self, exchange: Exchange, piece: bytes) -> None:
        if not self._has_flush:
            self._has_flush = True
            self._loop.call_soon(self._flush)
        if exchange.has_chunks:
            self._output.append(b"%x\r\n%b\r\n" % (len(piece), piece))
        else:
            self._output.append(piece)

    def _finish(self, exchange: Exchange) -> None:
        self._flush()
        if self._is_closing or not exchange.keeps_alive:
            self._transport.close()

    def _flush(self) -> None:
        self._has_flush = False
        if self._output:
            if not self._transport.is_closing():
                self._transport.write(b"".join(self._output))
            self._output.clear()


def _too_large() -> Response:
    return refusal(413, f"the body is larger than {MAX_BODY_BYTES} bytes")


def _path(url: bytes) -> str:
    """Return the path of a request's target: "/path?query", or with scheme and host as proxies send it."""
    path = url.partition(b"?")[0] if url.startswith(b"/") else httptools.parse_url(url).path or b"/"
    return (unquote_to_bytes(path) if b"%" in path else path).decode(errors="replace")


_date = (0, b"")


def _date_line() -> bytes:
    """Return the Date header, made anew once a second."""
    global _date
    now = int(time.time())
    if now != _date[0]:
        _date = (now, f"date: {formatdate(now, usegmt=True)}\r\n".encode())
    return _date[1]


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()):
        logger.error("a request failed", exc_info=error)
