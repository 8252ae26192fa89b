"""`Cors`: which web pages of other origins may talk to this server (https://fetch.spec.whatwg.org/#http-cors-protocol).

Keeps nobody out but scripts in browsers, who obey it: API keys are for everybody else.
"""

from collections.abc import Sequence

from octavo.frontend.http.message import Request, Response
from octavo.protocol.config import ServerConfig

ANY = "*"

ALL_METHODS = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"

MAX_AGE_S = 600
"""How long a browser may remember the answer to a preflight request."""


class Cors:
    """The rules, and the headers that tell browsers of them.

    Args:
        origins: e.g. "https://example.org"; "*": all; none: no page of another origin.
        methods: that pages may use; "*": all.
        headers: of requests that pages may send; "*": all.
        allows_credentials: pages may send cookies and HTTP authentication along.
    """

    def __init__(
        self,
        origins: Sequence[str] = (ANY,),
        methods: Sequence[str] = (ANY,),
        headers: Sequence[str] = (ANY,),
        *,
        allows_credentials: bool = False,
    ) -> None:
        self._origins = frozenset(origins)
        self._methods = ALL_METHODS if ANY in methods else ", ".join(methods)
        self._headers = None if ANY in headers else ", ".join(headers)
        self._credentials = {"access-control-allow-credentials": "true"} if allows_credentials else {}
        # With credentials a browser does not take "*" for an answer, so the origin itself is named.
        self._names_origin = ANY not in self._origins or allows_credentials

    @classmethod
    def of(cls, config: ServerConfig) -> "Cors":
        """Return the rules that the configuration states."""
        rules = (config.allowed_origins, config.allowed_methods, config.allowed_headers)
        origins, methods, headers = [[ANY] if words is None else words for words in rules]
        return cls(origins, methods, headers, allows_credentials=config.allow_credentials)

    def headers(self, request: Request) -> dict[str, str]:
        """Return what an answer tells the browser that made the request; nothing where none did."""
        origin = request.header(b"origin")
        if origin is None or not self._origins:
            return {}
        vary = {"vary": "Origin"} if self._names_origin else {}
        if not (ANY in self._origins or origin in self._origins):
            return vary
        allowed = origin if self._names_origin else ANY
        exposed = {"access-control-expose-headers": "X-Request-Id, Retry-After"}
        return {"access-control-allow-origin": allowed, **self._credentials, **exposed, **vary}

    def preflight(self, request: Request) -> Response | None:
        """Return the answer to the question that a browser asks before a request of a page, None to anything else.

        It comes without credentials. A page that may not ask gets an answer that does not name its origin.
        """
        if request.method != "OPTIONS" or request.header(b"access-control-request-method") is None:
            return None
        allowed = {"access-control-allow-methods": self._methods, "access-control-max-age": str(MAX_AGE_S)}
        headers = self._headers or request.header(b"access-control-request-headers")
        if headers:
            allowed["access-control-allow-headers"] = headers
        return Response(status=204, headers=allowed)
