"""`ApiRequest`: a Starlette request whose body was read within our limits, and the id for its response."""

import secrets
from typing import TYPE_CHECKING, Any, TypeAlias

from starlette.requests import Request

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope

JSON = "application/json"

MAX_ID_CHARS = 256

_BODY = "octavo.body"
_ID = "octavo.request_id"


class RequestId:
    """The id of one request: the client's `X-Request-Id`, else the body's `request_id`, else a random one.

    An object, so that a middleware that copies the scope shares it with the route.
    """

    __slots__ = ("_text", "is_from_header")

    def __init__(self, header: str) -> None:
        self._text = header[:MAX_ID_CHARS]
        self.is_from_header = bool(header)

    @classmethod
    def of(cls, scope: "Scope") -> "RequestId":
        """Return the id of the request with this scope."""
        found = scope.get(_ID)
        if not isinstance(found, cls):
            found = scope[_ID] = cls(header_value(scope, b"x-request-id"))
        return found

    @property
    def text(self) -> str:
        """At most `MAX_ID_CHARS` characters."""
        if not self._text:
            self._text = secrets.token_hex(16)
        return self._text

    def replace(self, text: str) -> None:
        """Use another id, unless it cannot be a header value."""
        if text.isascii() and text.isprintable():
            self._text = text[:MAX_ID_CHARS]


class RequestBody:
    """A complete body; also an ASGI `receive` function that returns the body once."""

    __slots__ = ("_body", "_receive")

    def __init__(self, body: bytes, receive: "Receive") -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> "Message":
        """Return the body at the first call, later the server's messages."""
        if self._body is None:
            return await self._receive()
        return {"type": "http.request", "body": self.take(), "more_body": False}

    def take(self) -> bytes:
        """Return the body and drop it; later calls return an empty body."""
        body, self._body = self._body, None
        return body or b""

    def put_into(self, scope: "Scope") -> None:
        """Store the body in a scope, for `ApiRequest`."""
        scope[_BODY] = self


class ApiRequest(Request):
    """The request that a handler receives."""

    def take_body(self) -> bytes:
        """Return the body and drop it: a response may take minutes, and a body may have megabytes."""
        if hasattr(self, "_body"):  # a dependency or a middleware of the embedding application has read it
            return self._body
        body = self.scope[_BODY]
        assert isinstance(body, RequestBody)
        return body.take()

    @property
    def request_id(self) -> str:
        """The id of this request."""
        return RequestId.of(self.scope).text

    def choose_id(self, text: str | None) -> str:
        """Return the id of this request: the header `X-Request-Id`, else `text`, else a random one."""
        request_id = RequestId.of(self.scope)
        if not text or request_id.is_from_header:
            return request_id.text
        request_id.replace(text)
        return text


Headers: TypeAlias = list[tuple[bytes, bytes]]


def header_value(scope: "Scope", name: bytes) -> str:
    """Return the first header with this lower-case name; "" if there is none."""
    headers: Any = scope["headers"]
    for key, value in headers:
        if key == name:
            return str(value, "latin-1")
    return ""


def route_path(scope: "Scope") -> str:
    """Return the path below the application's root path, whether or not the request's path includes the root path."""
    path, root_path = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    if not root_path or not (path == root_path or path.startswith(root_path + "/")):
        return path
    return path.removeprefix(root_path)
