"""`HttpConnection`: one HTTP/1.1 connection on asyncio streams, from the caller's side. Opens none itself."""

import asyncio
from collections.abc import AsyncIterator

READ_LIMIT_BYTES = 2**22
"""Longest line that is read: an event of a stream is one."""


class HttpConnection:
    """One connection, on which one answer at a time is read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._headers: dict[bytes, bytes] = {}

    @property
    def is_reusable(self) -> bool:
        """Whether the answer that was read leaves the connection open."""
        has_end = b"content-length" in self._headers or b"transfer-encoding" in self._headers
        return has_end and self._headers.get(b"connection", b"").lower() != b"close"

    async def ask(self, request: bytes) -> int:
        """Send a request; return the status once the head of the answer is there.

        Raises:
            ValueError: the answer is not HTTP.
            EOFError: the server closed the connection.
        """
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        first, *lines = head.rstrip(b"\r\n").split(b"\r\n")
        fields = (line.partition(b":") for line in lines)
        self._headers = {name.strip().lower(): value.strip() for name, _, value in fields}
        return int(first.split()[1])

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the answer's body as it comes, to its end."""
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
        """Close it, whatever is still to be read."""
        self._writer.close()
