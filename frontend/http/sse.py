"""Server-sent events: a response that streams JSON texts, with comments during long silences."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from octavo.frontend.http.errors import failure_body, failure_response
from octavo.protocol.errors import OctavoError

DONE = b"data: [DONE]\n\n"

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients of server-sent events ignore."""

DIRECT_SEND = "octavo.direct_send"
"""Key in the ASGI scope: the server's own `send`, for stream pieces that no middleware needs to inspect."""

_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
)


def events(bodies: Iterable[bytes]) -> bytes:
    """Return server-sent events to be sent together. The bodies are JSON and therefore contain no line breaks."""
    return b"".join([b"data: %b\n\n" % body for body in bodies])


def named_events(bodies: Iterable[bytes]) -> bytes:
    """Return named events to be sent together. Each name is the type, the first field of each body."""
    return b"".join([b"event: %b\ndata: %b\n\n" % (_first_value(body), body) for body in bodies])


def _first_value(body: bytes) -> bytes:
    begin = body.index(b':"') + 2
    return body[begin : body.index(b'"', begin)]


@dataclass(frozen=True, slots=True)
class Framing:
    """How an API frames its events."""

    join: Callable[[Iterable[bytes]], bytes]
    """Joins several events that are sent together."""
    end: bytes
    """What follows the last event."""


PLAIN_EVENTS = Framing(events, DONE)
"""Framing of chat and plain completions."""

NAMED_EVENTS = Framing(named_events, b"")
"""Framing of Anthropic's messages."""


class EventStream(Response):
    """Sends events as they arrive.

    Status and headers are sent with the first event, so an error before it still has its own HTTP status. A later
    error, or an error after a comment, becomes an `{"error": ...}` event or the events of `fail`. The framing's end
    always comes last: for example `data: [DONE]`, where nothing else marks a stream as complete.

    Args:
        pieces: one or several events each. Closed at the end, so that the engine learns at once that nobody reads.
        keep_alive_s: seconds of silence after which a comment is sent; 0: never.
        framing: the framing of the pieces.
        fail: returns the events for a later error, for an API with error events of its own.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes],
        keep_alive_s: float,
        framing: Framing = PLAIN_EVENTS,
        fail: Callable[[Exception], list[bytes]] | None = None,
    ) -> None:
        self.status_code = 200
        self.raw_headers = list(_HEADERS)
        self.background = None
        self._pieces = pieces
        self._keep_alive_s = keep_alive_s
        self._framing = framing
        self._fail = fail
        self._has_begun = False
        self._is_sending = False
        self._last_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the complete stream.

        Raises:
            Exception: an unexpected error of the pieces; the client has already received an error event.
        """
        loop = asyncio.get_running_loop()
        self._last_s = loop.time()
        if self._keep_alive_s:
            self._timer = loop.call_later(self._keep_alive_s, self._on_timer, loop, send)
        try:
            send_body = scope.get(DIRECT_SEND, send)
            await self._send_pieces(loop, send, send_body, only_first=True)
            # perf: a separate task resumes without the frames of all middleware, for each piece. A stream that still
            # waits for its first piece does not need one.
            await loop.create_task(self._send_pieces(loop, send, send_body))
        except OctavoError as error:
            await self._send_failure(error, scope, receive, send)
            return
        except Exception as error:
            await self._send_failure(error, scope, receive, send)
            raise
        finally:
            await self._stop_comments()
            await self._pieces.aclose()
        await self._begin(send)
        await _send_last(self._framing.end, send)
        if self.background is not None:  # tasks of an embedding application's dependencies
            await self.background()

    async def _send_pieces(
        self, loop: asyncio.AbstractEventLoop, send: Send, send_body: Send, *, only_first: bool = False
    ) -> None:
        async for piece in self._pieces:
            self._is_sending = True
            if self._comment is not None:
                await self._comment
            if not self._has_begun:
                await self._begin(send)
            await send_body({"type": "http.response.body", "body": piece, "more_body": True})
            self._last_s = loop.time()
            self._is_sending = False
            if only_first:
                return

    async def _send_failure(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        await self._stop_comments()
        if self._has_begun:
            bodies = [failure_body(scope, error)] if self._fail is None else self._fail(error)
            await _send_last(self._framing.join(bodies) + self._framing.end, send)
        else:
            await failure_response(scope, error)(scope, receive, send)

    async def _begin(self, send: Send) -> None:
        if not self._has_begun:
            self._has_begun = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    def _on_timer(self, loop: asyncio.AbstractEventLoop, send: Send) -> None:
        """Send a comment after enough silence, and check again when the next one could be due."""
        left_s = self._last_s + self._keep_alive_s - loop.time()
        if left_s <= 0:
            left_s = self._keep_alive_s
            # If the client does not read what is being sent, the silence is not ours.
            if not self._is_sending and (self._comment is None or self._comment.done()):
                self._comment = loop.create_task(self._send_comment(loop, send))
        self._timer = loop.call_later(left_s, self._on_timer, loop, send)

    async def _send_comment(self, loop: asyncio.AbstractEventLoop, send: Send) -> None:
        await self._begin(send)
        await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
        self._last_s = loop.time()

    async def _stop_comments(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._comment is not None:
            comment, self._comment = self._comment, None
            comment.cancel()
            await asyncio.wait([comment])


async def _send_last(body: bytes, send: Send) -> None:
    message: Message = {"type": "http.response.body", "body": body, "more_body": False}
    await send(message)
