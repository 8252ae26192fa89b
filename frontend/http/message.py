"""Requests and responses of the HTTP server, without the connection that they travel on."""

import secrets
from collections.abc import AsyncGenerator, Mapping

JSON = "application/json"

MAX_ID_CHARS = 256


class Request:
    """One request; its body is there when a route sees it."""

    __slots__ = ("_id", "body", "headers", "method", "path", "variables")

    def __init__(self, method: str, path: str, headers: dict[bytes, bytes]) -> None:
        self.method = method
        self.path = path
        """Without the query, percent signs resolved."""
        self.headers = headers
        """By lower-case name; of several with one name, the first."""
        self.body = b""
        self.variables: dict[str, str] = {}
        """What stands in the path for the variables of the route."""
        self._id = ""

    @property
    def request_id(self) -> str:
        """The caller's own name for the request (`X-Request-Id`, cut to `MAX_ID_CHARS`), else a random one."""
        if not self._id:
            self._id = (self.header(b"x-request-id") or "")[:MAX_ID_CHARS] or secrets.token_hex(16)
        return self._id

    @request_id.setter
    def request_id(self, name: str) -> None:
        if name.isascii() and name.isprintable():  # else a header has no place for it
            self._id = name[:MAX_ID_CHARS]

    def take_body(self) -> bytes:
        """Return the body, and forget it: an answer may take minutes, and a body may have megabytes."""
        body, self.body = self.body, b""
        return body

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


class StreamedResponse(Response):
    """An answer that is sent piece by piece as it comes into being.

    Status and headers are sent with the first piece, so whatever fails before it can still be answered by
    another response, unless a silence before it was so long that they had to be sent without one.
    """

    __slots__ = ("has_begun",)

    def __init__(
        self, status: int = 200, headers: Mapping[str, str] | None = None, media_type: str | None = None
    ) -> None:
        super().__init__(b"", status, headers, media_type)
        self.has_begun = False
        """Set by the sender when status and headers are out: failures are then told within the stream."""

    def pieces(self) -> AsyncGenerator[bytes]:
        """Return what yields the body's pieces, one at least; whoever takes it also closes it."""
        raise NotImplementedError
