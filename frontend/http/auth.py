"""API keys: a request without a valid one goes no further. Knows nothing of what a route does."""

import hashlib
import hmac
from collections.abc import Sequence

from octavo.frontend.http.message import JSON, Request, Response

OPEN_PATHS = frozenset({"/health", "/ping"})
"""What probes of a load balancer ask, who have no key."""


class ApiKeys:
    """Lets a request in that has `Authorization: Bearer KEY`, or asks for one of `OPEN_PATHS`.

    Args:
        keys: the accepted ones; none: everybody is let in.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def refusal(self, request: Request) -> Response | None:
        """Return the answer to a request without a key, None when it may go on."""
        if not self._digests or request.path in OPEN_PATHS or self._has_key(request):
            return None
        return Response(b'{"error":"Unauthorized"}', 401, {"www-authenticate": "Bearer"}, JSON)

    def _has_key(self, request: Request) -> bool:
        scheme, _, key = (request.header(b"authorization") or "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        # Digests have one length and every key is compared, so the time taken tells nothing.
        digest = _digest(key.strip())
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
