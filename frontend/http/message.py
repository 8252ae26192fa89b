"""Requests and responses of the HTTP server, without the connection that they travel on."""

from collections.abc import AsyncGenerator, Mapping

JSON = "application/json"


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


class StreamedResponse(Response):
    """An answer that is sent piece by piece as it comes into being.

    Status and headers are sent with the first piece, so whatever fails before it can still be answered by
    another response.
    """

    __slots__ = ()

    def pieces(self) -> AsyncGenerator[bytes]:
        """Return what yields the body's pieces, one at least; whoever takes it also closes it."""
        raise NotImplementedError
