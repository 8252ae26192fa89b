"""Requests and responses of the HTTP server, without the connection that they travel on."""

from collections.abc import AsyncGenerator, Mapping
from http import HTTPStatus

JSON = "application/json"

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class Request:
    """One request; its body is there when a route sees it."""

    __slots__ = ("body", "headers", "method", "path", "variables")

    def __init__(self, method: str, path: str, headers: dict[bytes, bytes]) -> None:
        self.method = method
        self.path = path
        """Without the query, percent signs resolved."""
        self.headers = headers
        """By lower-case name; of several with one name, the first."""
        self.body = b""
        self.variables: dict[str, str] = {}
        """What stands in the path for the variables of the route."""

    def header(self, name: bytes) -> str | None:
        """Return a header's value, None when it is not there.

        Args:
            name: in lower case.
        """
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")


class Response:
    """A whole answer."""

    __slots__ = ("body", "headers", "status")

    def __init__(
        self,
        body: bytes = b"",
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str | None = None,
    ) -> None:
        self.body = body
        self.status = status
        self.headers = dict(headers or ())
        if media_type is not None:
            self.headers["content-type"] = media_type

    def head(self, *extra: bytes) -> bytes:
        """Return status line and headers as they go over the wire.

        Args:
            extra: lines that the connection adds, each with its line end.
        """
        own = "".join([f"{name}: {value}\r\n" for name, value in self.headers.items()])
        return b"".join([status_line(self.status), own.encode("latin-1"), *extra, b"\r\n"])


class StreamedResponse(Response):
    """An answer that is sent piece by piece as it comes into being.

    Status and headers are sent with the first piece, so whatever fails before it can still be answered by
    another response.
    """

    __slots__ = ()

    def pieces(self) -> AsyncGenerator[bytes]:
        """Return what yields the body's pieces; whoever takes it also closes it."""
        raise NotImplementedError


def status_line(status: int) -> bytes:
    """Return the first line of a response."""
    return _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n".encode()
