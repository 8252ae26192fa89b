"""`AsgiApp`: the application as ASGI 3 has it, for any server that speaks it. Knows no route and no socket.

The interface: https://asgi.readthedocs.io/en/latest/specs/www.html. Pieces are sent one by one as they come: what
is sent in one turn of the event loop goes out in one write, which is uvloop's doing.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from octavo.frontend.http.bodies import Bodies, BodyRefused, Receive
from octavo.frontend.http.message import Request, Response, StreamedResponse
from octavo.frontend.http.stream_sender import Message, Send, StreamSender
from octavo.protocol.errors import OctavoError


class Application(Protocol):
    """What answers the requests."""

    def screen(self, request: Request) -> Response | None:
        """Return the answer to a request that its head already refuses; else its body is read."""

    async def answer(self, request: Request) -> Response:
        """Return the answer to a request."""

    def failure(self, request: Request, error: Exception) -> Response:
        """Return the answer to a request that failed before the first piece of its response."""

    def headers(self, request: Request) -> Mapping[str, str]:
        """Return what the head of every response to this request also says."""


class AsgiApp:
    """Reads requests, has them answered and sends the responses.

    An unexpected error is answered too, then goes on to the server, which logs it and closes the connection.

    Args:
        app: what answers.
        max_body_bytes: a longer body is refused.
        keep_alive_s: seconds of silence after which a stream sends a comment; 0: never.
    """

    def __init__(self, app: Application, *, max_body_bytes: int, keep_alive_s: float) -> None:
        self._app = app
        self._bodies = Bodies(max_body_bytes)
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request.

        Raises:
            ValueError: it is no HTTP request.
        """
        if scope["type"] != "http":
            raise ValueError(f"only http is served, not {scope['type']}")
        # In reverse, so that of several headers with one name the first stays.
        request = Request(scope["method"], scope["path"], dict(reversed(scope["headers"])))
        length = request.headers.get(b"content-length", b"0")
        refused = self._app.screen(request) or self._bodies.refused_length(length)
        if refused is None:
            try:
                body = await self._bodies.receive(receive)
            except BodyRefused as error:
                refused = error.response
            else:
                if body is None:
                    return
                request.body = body
                del body  # its route may forget it
        if refused is None:
            await self._work(request, receive, send)
        else:
            await self._send_whole(request, refused, send)

    async def _work(self, request: Request, receive: Receive, send: Send) -> None:
        """Answer a request unless its caller leaves: then whatever works on it is cancelled."""
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.create_task(_cancel_on_leaving(task, receive))
        try:
            await self._answer(request, send)
        except asyncio.CancelledError:
            # Not the caller's leaving, or not that alone: the server wants the task to end.
            if not watcher.done() or task.uncancel():
                raise
        finally:
            watcher.cancel()

    async def _answer(self, request: Request, send: Send) -> None:
        try:
            response = await self._app.answer(request)
        except Exception as error:
            await self._send_whole(request, self._app.failure(request, error), send)
            raise
        if isinstance(response, StreamedResponse):
            await self._send_stream(request, response, send)
        else:
            await self._send_whole(request, response, send)

    async def _send_stream(self, request: Request, response: StreamedResponse, send: Send) -> None:
        sender = StreamSender(send, response, self._head(request, response), self._keep_alive_s)
        pieces = response.pieces()
        try:
            async for piece in pieces:
                await sender.send(piece)
        except Exception as error:
            await sender.stop()
            if response.has_begun:
                # In order: the stream itself has told its caller.
                await send({"type": "http.response.body"})
            else:
                await self._send_whole(request, self._app.failure(request, error), send)
                if isinstance(error, OctavoError):
                    return
            raise
        finally:
            # Not left to the garbage collector: the engine must hear now that nobody listens.
            await sender.stop()
            await pieces.aclose()
        await send({"type": "http.response.body"})

    async def _send_whole(self, request: Request, response: Response, send: Send) -> None:
        head = self._head(request, response)
        head["headers"].append((b"content-length", b"%d" % len(response.body)))
        await send(head)
        await send({"type": "http.response.body", "body": response.body})

    def _head(self, request: Request, response: Response) -> Message:
        lines = [*response.headers.items(), *self._app.headers(request).items()]
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in lines]
        return {"type": "http.response.start", "status": response.status, "headers": headers}


async def _cancel_on_leaving(task: "asyncio.Task[Any]", receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()
