"""`StreamSender`: the pieces of one streamed response on their way out, with signs of life in long silences.

Knows nothing of what the pieces are, but that a comment may stand between two of them.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from octavo.frontend.http.message import StreamedResponse

Message: TypeAlias = MutableMapping[str, Any]
"""What an ASGI server and its application say to each other; also the scope, which opens a request."""
Send: TypeAlias = Callable[[Message], Awaitable[None]]

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which readers of server-sent events pass over."""


class StreamSender:
    """Sends the head with the first piece, and comments where nothing else goes out for long.

    A comment before the first piece settles the status: an error that comes later is told within the stream.

    Args:
        send: as ASGI has it.
        response: learns that it has begun.
        head: of the response.
        keep_alive_s: how long a silence may be; 0: for ever.
    """

    def __init__(self, send: Send, response: StreamedResponse, head: Message, keep_alive_s: float) -> None:
        self._send = send
        self._response = response
        self._head = head
        self._keep_alive_s = keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()
        self._is_sending = False
        self._comment: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(keep_alive_s, self._on_timer) if keep_alive_s else None

    async def send(self, piece: bytes) -> None:
        """Send a piece, after a comment that is on its way."""
        self._is_sending = True
        try:
            if self._comment is not None:
                await self._comment
            await self._put(piece)
        finally:
            self._is_sending = False

    async def stop(self) -> None:
        """Send no more comments; harmless the second time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._comment is not None:
            comment, self._comment = self._comment, None
            comment.cancel()
            await asyncio.wait([comment])

    async def _put(self, piece: bytes) -> None:
        if not self._response.has_begun:
            await self._send(self._head)
            self._response.has_begun = True
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        self._last_s = self._loop.time()

    def _on_timer(self) -> None:
        """Comment on a silence that is long enough, and look again when the next one could be."""
        left_s = self._last_s + self._keep_alive_s - self._loop.time()
        if left_s <= 0:
            left_s = self._keep_alive_s
            # What is being sent to somebody who does not read is no silence of ours.
            if not self._is_sending and (self._comment is None or self._comment.done()):
                self._comment = self._loop.create_task(self._put(KEEP_ALIVE))
        self._timer = self._loop.call_later(left_s, self._on_timer)
