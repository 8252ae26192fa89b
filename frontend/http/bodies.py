"""`Bodies`: receives the bodies of requests, within bounds on each, on all together and on their pace.

Knows no route and decodes nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from octavo.frontend.http.errors import RETRY_AFTER_S, refusal
from octavo.frontend.http.message import Response
from octavo.frontend.http.stream_sender import Message

Receive = Callable[[], Awaitable[Message]]

LARGE_BODY_BYTES = 2**18
"""A body above it takes a millisecond or more to decode, so that of several only one is in each turn of the loop."""

AT_ONCE = 16
"""Bodies of the greatest length that may be on their way together."""

GRACE_S = 60.0
SLOWEST_BYTES_PER_S = 1024
"""A body may fall behind this pace by the grace: a caller who sends a byte a minute must not hold a place for ever, nor
one who has sent much at once."""


class BodyRefused(Exception):
    """A body that is not received to its end.

    Args:
        response: what its caller hears.
    """

    def __init__(self, response: Response) -> None:
        super().__init__(response)
        self.response = response


class Bodies:
    """The bodies that are on their way.

    Args:
        max_bytes: of one body; `AT_ONCE` times as much of all together.
        grace_s: how far a body may fall behind the pace.
    """

    def __init__(self, max_bytes: int, grace_s: float = GRACE_S) -> None:
        self._max_bytes = max_bytes
        self._grace_s = grace_s
        self._num_held_bytes = 0
        self._large = asyncio.Lock()

    def refused_length(self, length: bytes) -> Response | None:
        """Return the answer to a request whose `content-length` already is too much."""
        return self._too_large() if length.isdigit() and int(length) > self._max_bytes else None

    async def receive(self, receive: Receive) -> bytes | None:
        """Return the whole body, to be decoded in this turn of the event loop; None if the caller has left.

        Raises:
            BodyRefused: it is too long, comes too slowly, or too much is on its way with it.
        """
        body = _Incoming()
        try:
            await self._receive_part(receive, body)
            if body.state == "begun":
                await self._receive_rest(receive, body)
            if body.state == "left":
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
                while body.state == "begun":
                    num_before = body.num_bytes
                    await self._receive_part(receive, body)
                    won_s = (body.num_bytes - num_before) / SLOWEST_BYTES_PER_S
                    latest_s = min(latest_s + won_s, loop.time() + self._grace_s)
                    limit.reschedule(latest_s)
        except TimeoutError:
            raise BodyRefused(refusal(408, "the body comes too slowly; send it again")) from None

    async def _receive_part(self, receive: Receive, body: "_Incoming") -> None:
        message = await receive()
        if message["type"] == "http.disconnect":
            body.state = "left"
            return
        part: bytes = message.get("body", b"")
        body.parts.append(part)
        body.num_bytes += len(part)
        self._num_held_bytes += len(part)
        if body.num_bytes > self._max_bytes:
            raise BodyRefused(self._too_large())
        if self._num_held_bytes > AT_ONCE * self._max_bytes:
            limit = f"{AT_ONCE * self._max_bytes} bytes"
            headers = {"retry-after": str(RETRY_AFTER_S)}
            raise BodyRefused(refusal(503, f"more than {limit} of bodies are on their way; try again later", headers))
        if not message.get("more_body", False):
            body.state = "whole"

    def _too_large(self) -> Response:
        limit = f"{self._max_bytes} bytes, which is the limit (--max-request-body-bytes)"
        return refusal(413, f"the body is larger than {limit}")


@dataclass(slots=True)
class _Incoming:
    """What has come of a body."""

    parts: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    state: Literal["begun", "whole", "left"] = "begun"
