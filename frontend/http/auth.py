"""API keys: a request without a valid one goes no further. Knows nothing of what a route does."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = frozenset({"/health", "/ping"})
"""What probes of a load balancer ask, who have no key."""


class RequireApiKey:
    """ASGI middleware: every path but `OPEN_PATHS` needs `Authorization: Bearer KEY`.

    Args:
        app: what to guard.
        keys: the accepted ones.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS or self._is_allowed(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        refusal = Response(
            b'{"error":"Unauthorized"}', 401, {"WWW-Authenticate": "Bearer"}, media_type="application/json"
        )
        await refusal(scope, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        # Digests have one length and every key is compared, so the time taken tells nothing.
        digest = _digest(key.strip())
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
