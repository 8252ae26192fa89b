"""A load generator with little overhead: many keep-alive connections of one process, raw bytes, no HTTP library.

It supports two kinds of HTTP/1.1 answers: with a content length and in chunks. It parses only the status, the first
event and the end of an answer, so that it does not limit what it measures.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_LENGTH = b"content-length:"
_EVENT = b"data: "


@dataclass(slots=True)
class Answer:
    """The result of one request; times on the monotonic clock, in seconds."""

    status: int
    sent: float
    first: float
    """When the first event of a stream arrived, or a whole answer was complete."""
    finished: float
    num_bytes: int
    body: bytes = b""
    """Response body; kept only for failed requests."""


def encode_request(path: str, body: bytes, host: str) -> bytes:
    """Return the bytes of a POST request."""
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + _HEAD_END + body


async def drive(host: str, port: int, requests: Iterable[bytes], num_connections: int) -> list[Answer]:
    """Send the requests; each connection sends its next one as soon as it has received a response.

    Raises:
        ConnectionError: the server closed a connection before the answer was complete.
    """
    loop = asyncio.get_running_loop()
    todo = deque(requests)
    connections: list[_Connection] = []
    for _ in range(min(num_connections, len(todo))):
        _, connection = await loop.create_connection(lambda: _Connection(todo, loop.create_future()), host, port)
        connections.append(connection)
    for connection in connections:
        connection.start()
    try:
        await asyncio.gather(*[connection.done for connection in connections])
    finally:
        for connection in connections:
            connection.close()
    return [answer for connection in connections for answer in connection.answers]


class _Connection(asyncio.Protocol):
    """One keep-alive connection, busy until the common queue of requests is empty."""

    def __init__(self, todo: "deque[bytes]", done: "asyncio.Future[None]") -> None:
        self.answers: list[Answer] = []
        self.done = done
        self._todo = todo
        self._buffer = bytearray()
        self._sent = self._first = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def start(self) -> None:
        """Send the next request, or report that there is none."""
        if not self._todo:
            self.done.set_result(None)
            return
        self._buffer.clear()
        self._first = 0.0
        self._sent = time.monotonic()
        self._transport.write(self._todo.popleft())

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        buffer = self._buffer
        if not self._first and _EVENT in buffer:
            self._first = time.monotonic()
        if not _is_complete(buffer):
            return
        now = time.monotonic()
        status = int(buffer[9:12])
        body = b"" if status == 200 else bytes(buffer)
        self.answers.append(Answer(status, self._sent, self._first or now, now, len(buffer), body))
        self.start()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the server closed the connection"))

    def close(self) -> None:
        self._transport.close()


def _is_complete(buffer: bytearray) -> bool:
    head_end = buffer.find(_HEAD_END)
    if head_end < 0:
        return False
    head = buffer[:head_end].lower() + b"\r\n"
    found = head.find(_LENGTH)
    if found < 0:
        return buffer.endswith(_LAST_CHUNK)
    length = int(head[found + len(_LENGTH) : head.index(b"\r\n", found)])
    return len(buffer) >= head_end + len(_HEAD_END) + length
