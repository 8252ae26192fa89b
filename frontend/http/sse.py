"""Answers that take time: noticing that the caller has left, and server-sent events.

Either way the work is cancelled when the caller leaves, which aborts its requests in the engine.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.frontend.http.errors import error_body
from octavo.protocol.errors import OctavoError

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

CLIENT_CLOSED_REQUEST = 499
"""Status of a response that nobody is left to read."""


class CallerLeft(Exception):
    """The caller closed the connection before the answer was there."""


def event(body: bytes) -> bytes:
    """Return one server-sent event; the body must hold no line break, as JSON does not."""
    return b"data: " + body + b"\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work unless the caller leaves first.

    Args:
        receive: of a request whose body has been read.
        work: cancelled, and waited for, when the caller leaves.

    Raises:
        CallerLeft: the caller left.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise CallerLeft
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return what the work makes, cancelled when the caller leaves."""
    try:
        return await until_disconnect(request.receive, work)
    except CallerLeft:
        return Response(status_code=CLIENT_CLOSED_REQUEST)


class EventStream(Response):
    """Sends events as they come.

    Headers are sent with the first event, so a failure before it still has its own HTTP status; a
    later one becomes an `{"error": ...}` event. `data: [DONE]` always comes last.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        # No superclass call: it would set a body and with it a content length.
        self.status_code = 200
        self.background = None
        self._events = events
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or as much as the caller stays for."""
        with contextlib.suppress(CallerLeft):
            await until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        try:
            chunk = await anext(self._events)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send_body(chunk, send)
        finally:
            # Not left to the garbage collector: the engine must hear now that nobody listens.
            await self._events.aclose()

    async def _send_body(self, chunk: bytes, send: Send) -> None:
        try:
            await send(_body(chunk))
            async for chunk in self._events:
                await send(_body(chunk))
        except OctavoError as error:
            await send(_body(event(error_body(error))))
        except Exception as error:
            await send(_body(event(error_body(error)) + DONE, is_last=True))
            raise
        await send(_body(DONE, is_last=True))


def _body(chunk: bytes, *, is_last: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": chunk, "more_body": not is_last}
