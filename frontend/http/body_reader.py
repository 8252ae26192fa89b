"""`BodyReader`: receives request bodies, limits their individual and total size, and rejects slow senders.

Independent of the routes. It decodes nothing.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from starlette.responses import Response
from starlette.types import Receive, Scope

from octavo.frontend.http.errors import RETRY_AFTER_S, rejection

LARGE_BODY_BYTES = 2**18
"""A larger body takes at least a millisecond to decode, so only one of them is decoded per iteration of the loop."""

AT_ONCE = 16
"""Limit on the bytes of all unfinished bodies together, as a multiple of the maximum size of one body."""

GRACE_S = 60.0
SLOWEST_BYTES_PER_S = 1024
"""Minimum rate; a body may lag behind it by `GRACE_S` at most. A client can neither hold its place by sending a byte
per minute nor by sending much at once and then stopping."""


class BodyRejected(Exception):
    """The body is rejected, and the rest of it is not read.

    Args:
        status: HTTP status of the error response.
        message: message of the error response.
        headers: additional headers of the error response.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self._status, self._message, self._headers = status, message, headers

    def response(self, scope: Scope) -> Response:
        """Return the error response to the request with this scope."""
        return rejection(self._status, self._message, self._headers, scope)


class BodyReader:
    """Reads the bodies of one application's requests.

    Args:
        max_bytes: maximum size of one body; all unfinished bodies together may have `AT_ONCE` times as many bytes.
        grace_s: seconds that a body may lag behind `SLOWEST_BYTES_PER_S`.
    """

    def __init__(self, max_bytes: int, grace_s: float = GRACE_S) -> None:
        self._max_bytes = max_bytes
        self._grace_s = grace_s
        self._num_held_bytes = 0
        self._large = asyncio.Lock()

    def rejected_length(self, length: str) -> BodyRejected | None:
        """Return the error for a request whose `content-length` is too large, else `None`."""
        return self._too_large() if length.isdecimal() and length.isascii() and int(length) > self._max_bytes else None

    async def read(self, receive: Receive) -> bytes | None:
        """Return the complete body, to be decoded without further waiting; `None` if the client has disconnected.

        Raises:
            BodyRejected: the body is too large or too slow, or the unfinished bodies are too large together.
        """
        body = _Incoming()
        try:
            await self._receive_part(receive, body)
            if body.state == "partial":
                await self._receive_rest(receive, body)
            if body.state == "disconnected":
                return None
            if body.num_bytes > LARGE_BODY_BYTES:
                async with self._large:
                    await asyncio.sleep(0)
            return b"".join(body.parts)
        finally:
            self._num_held_bytes -= body.num_bytes

    async def _receive_rest(self, receive: Receive, body: "_Incoming") -> None:
        loop = asyncio.get_running_loop()
        latest_s = loop.time() + self._grace_s
        try:
            async with asyncio.timeout_at(latest_s) as limit:
                while body.state == "partial":
                    num_before = body.num_bytes
                    await self._receive_part(receive, body)
                    earned_s = (body.num_bytes - num_before) / SLOWEST_BYTES_PER_S
                    latest_s = min(latest_s + earned_s, loop.time() + self._grace_s)
                    limit.reschedule(latest_s)
        except TimeoutError:
            raise BodyRejected(408, "the body arrives too slowly; send it again") from None

    async def _receive_part(self, receive: Receive, body: "_Incoming") -> None:
        event = await receive()
        if event["type"] == "http.disconnect":
            body.state = "disconnected"
            return
        part: bytes = event.get("body", b"")
        body.parts.append(part)
        body.num_bytes += len(part)
        self._num_held_bytes += len(part)
        if body.num_bytes > self._max_bytes:
            raise self._too_large()
        if self._num_held_bytes > AT_ONCE * self._max_bytes:
            message = f"more than {AT_ONCE * self._max_bytes} bytes of bodies are being received; try again later"
            raise BodyRejected(503, message, {"retry-after": str(RETRY_AFTER_S)})
        if not event.get("more_body", False):
            body.state = "complete"

    def _too_large(self) -> BodyRejected:
        limit = f"{self._max_bytes} bytes, which is the limit (--max-request-body-bytes)"
        return BodyRejected(413, f"the body is larger than {limit}")


@dataclass(slots=True)
class _Incoming:
    """A body that is being received."""

    parts: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    state: Literal["partial", "complete", "disconnected"] = "partial"
