"""API keys: a request without a valid one goes no further. Knows nothing of what a route does."""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

from octavo.frontend.http.message import JSON, Request, Response

OPEN_PATHS = frozenset({"/health", "/ping"})
"""What probes of a load balancer ask, who have no key."""


class ApiKeys:
    """Lets a request in that has `Authorization: Bearer KEY`, or asks for one of `OPEN_PATHS`.

    A browser sends no such header when somebody opens a page. It is asked for HTTP Basic credentials instead (any name,
    the key as password) and from then on sends them by itself, also where another site's page makes it ask: so
    with these a request must not come from another origin.

    Args:
        keys: the accepted ones; none: everybody is let in.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def refusal(self, request: Request) -> Response | None:
        """Return the answer to a request without a key, None when it may go on."""
        if not self._digests or request.path in OPEN_PATHS or self._has_key(request):
            return None
        challenge = 'Basic realm="octavo: any name, the API key as password"' if _is_page(request.path) else "Bearer"
        return Response(b'{"error":"Unauthorized"}', 401, {"www-authenticate": challenge}, JSON)

    def _has_key(self, request: Request) -> bool:
        scheme, _, credentials = (request.header(b"authorization") or "").partition(" ")
        if scheme.lower() == "bearer":
            key = credentials
        elif scheme.lower() == "basic" and _is_own_origin(request):
            key = _password(credentials)
        else:
            return False
        # Digests have one length and every key is compared, so the time taken tells nothing.
        digest = _digest(key.strip())
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _is_page(path: str) -> bool:
    """True for what people open in a browser, which can only ask them for a name and a password."""
    return path in ("/", "/docs") or path.startswith("/dashboard/")


def _is_own_origin(request: Request) -> bool:
    """False when a page of another site made the browser send this."""
    if request.header(b"sec-fetch-site") in ("cross-site", "same-site"):
        return False
    origin = request.header(b"origin")
    return origin is None or origin.partition("://")[2] == request.header(b"host")


def _password(credentials: str) -> str:
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
