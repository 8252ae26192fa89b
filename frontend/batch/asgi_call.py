"""`call`: sends one request to an ASGI application in this process, without a server."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Scope

_IS_OF_BATCH = "octavo.is_of_batch"


@dataclass(slots=True)
class Response:
    """A complete response."""

    status: int = HTTPStatus.INTERNAL_SERVER_ERROR
    body: bytes = b""
    error: Exception | None = None
    """Exception that the application raised for the server's log."""


async def call(
    app: "ASGIApp", path: str, body: bytes, request_id: str, headers: Sequence[tuple[bytes, bytes]] = ()
) -> Response:
    """Post a JSON body, with further headers, and return the response."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode()), *headers],
        "client": None,
        "server": None,
        _IS_OF_BATCH: True,
    }
    requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    del body  # the route may free the body
    response = Response()
    parts: list[bytes] = []

    async def receive() -> "Message":
        if requests:
            return requests.pop()
        await asyncio.Event().wait()  # this client never disconnects
        raise AssertionError

    async def send(message: "Message") -> None:
        if message["type"] == "http.response.start":
            response.status = message["status"]
        else:
            parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception as error:
        response.error = error
    response.body = b"".join(parts)
    return response


def is_of_batch(scope: "Scope") -> bool:
    """Return whether a request is a line of a batch."""
    return _IS_OF_BATCH in scope
