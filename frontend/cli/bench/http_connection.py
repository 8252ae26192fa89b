"""`HttpConnection`: the client side of an HTTP/1.1 connection on asyncio streams."""

import asyncio
from collections.abc import AsyncIterator

READ_LIMIT_BYTES = 2**22
"""Maximum bytes of a line: an event of a stream is one line."""


class HttpConnection:
    """One connection. Responses are read one at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._headers: dict[bytes, bytes] = {}

    @property
    def is_reusable(self) -> bool:
        """Whether the connection can be reused after the last response."""
        has_end = b"content-length" in self._headers or b"transfer-encoding" in self._headers
        return has_end and self._headers.get(b"connection", b"").lower() != b"close"

    async def ask(self, request: bytes) -> int:
        """Send a request and return the status when the response head has arrived.

        Raises:
            ValueError: the response is not HTTP.
            EOFError: the server closed the connection.
        """
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        first, *lines = head.rstrip(b"\r\n").split(b"\r\n")
        fields = (line.partition(b":") for line in lines)
        self._headers = {name.strip().lower(): value.strip() for name, _, value in fields}
        return int(first.split()[1])

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the response body as it arrives."""
        reader = self._reader
        if self._headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
                yield (await reader.readexactly(size + 2))[:size]
            while await reader.readuntil(b"\r\n") != b"\r\n":
                pass  # trailers
        elif (length := self._headers.get(b"content-length")) is not None:
            yield await reader.readexactly(int(length))
        else:
            while piece := await reader.read(READ_LIMIT_BYTES):
                yield piece

    def close(self) -> None:
        """Close the connection, even with unread data."""
        self._writer.close()
