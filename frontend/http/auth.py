"""API keys: rejects requests without a valid one. Independent of the routes."""

import base64
import hashlib
import hmac
from collections.abc import Awaitable, Sequence
from http import HTTPStatus

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.frontend.calls.middleware import set_tenant
from octavo.frontend.http.errors import is_messages_path, messages_error_body, rejection
from octavo.frontend.http.request import JSON, RequestId, header_value, route_path
from octavo.frontend.tenants.file import TenantsFile

OPEN_PATHS = frozenset({"/health", "/ping"})
"""Paths that need no key, because load balancers probe them."""

ADMIN_PATH = "/v1/engines"
"""This path and those below it need an admin key. No other key is accepted there."""

TENANT_PATHS = ("/v1/", "/v2/", "/inference/")
TENANT_PAGES = frozenset(
    {"/pooling", "/classify", "/score", "/rerank", "/tokenize", "/detokenize", "/tokenizer_info", "/version"}
    | {"/docs", "/openapi.json"}
)
"""Pages that a tenant's key opens. All others concern the whole server: metrics, caches, weights, profiles."""

_NOT_FOR_TENANTS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})


class ApiKeyMiddleware:
    """Passes on requests that have `Authorization: Bearer KEY` or `x-api-key: KEY`, and requests for `OPEN_PATHS`.

    A browser sends no such header when somebody opens a page, so it is asked for HTTP Basic credentials (any name, the
    key as password). From then on it sends them by itself, even when a page of another site makes it send a request.
    Therefore requests with Basic credentials must not come from another origin.

    Args:
        app: receives the accepted requests.
        keys: the accepted keys; empty: no key is required, except below `ADMIN_PATH`.
        admin_keys: the keys of operators; empty: the routes below `ADMIN_PATH` do not exist.
        tenants: the tenants, whose keys open the paths in `TENANT_PATHS` and `TENANT_PAGES`; None: there are none.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        admin_keys: Sequence[str] = (),
        tenants: TenantsFile | None = None,
    ) -> None:
        self._app = app
        self._tenants = tenants
        self._digests = [_digest(key) for key in keys]
        self._admin_digests = [_digest(key) for key in admin_keys]

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Handle one request, or pass it on."""
        if scope["type"] == "lifespan" or (path := route_path(scope)) in OPEN_PATHS or self._is_allowed(scope, path):
            return self._app(scope, receive, send)
        if scope["type"] == "websocket":  # WebSocket routes of an embedding application
            return send({"type": "websocket.close", "code": 1008})
        if self._tenants is not None and self._tenants.find(_key_of(scope) or ""):
            message = f"the key of a tenant does not open {path}: it needs a key of --api-key"
            return rejection(HTTPStatus.FORBIDDEN, message, None, scope)(scope, receive, send)
        challenge = 'Basic realm="octavo: any name, the API key as password"' if _is_page(path) else "Bearer"
        body = b'{"error":"Unauthorized"}'
        if is_messages_path(path):
            message = "send a valid API key as x-api-key, or as Authorization: Bearer KEY"
            body = messages_error_body(HTTPStatus.UNAUTHORIZED, message, RequestId.of(scope).text)
        rejected = Response(body, 401, {"www-authenticate": challenge}, JSON)
        return rejected(scope, receive, send)

    def _is_allowed(self, scope: Scope, path: str) -> bool:
        if self._admin_digests and (path == ADMIN_PATH or path.startswith(ADMIN_PATH + "/")):
            return self._has_key(scope, self._admin_digests)
        if self._tenants is None:
            return not self._digests or self._has_key(scope, self._digests)
        return self._has_key(scope, self._digests) or self._is_tenant(scope, path, self._tenants)

    def _is_tenant(self, scope: Scope, path: str, tenants: TenantsFile) -> bool:
        """Return whether a tenant's key opens the path. If so, the call is attributed to that tenant."""
        if scope["type"] != "http" or (tenant := tenants.find(_key_of(scope) or "")) is None:
            return False  # limits apply to HTTP requests only
        if path in _NOT_FOR_TENANTS or not (path in TENANT_PAGES or path.startswith(TENANT_PATHS)):
            return False
        if path == ADMIN_PATH or path.startswith(ADMIN_PATH + "/"):
            return False
        set_tenant(scope, tenant)
        return True

    def _has_key(self, scope: Scope, digests: Sequence[bytes]) -> bool:
        if (key := _key_of(scope)) is None:
            return False
        # All digests have the same length and every key is compared, so the duration reveals nothing.
        digest = _digest(key)
        return sum(hmac.compare_digest(digest, known) for known in digests) > 0


def _key_of(scope: Scope) -> str | None:
    """Return the key of a request; `None` if it has no acceptable one."""
    scheme, _, credentials = header_value(scope, b"authorization").partition(" ")
    if scheme.lower() == "bearer":
        key = credentials
    elif scheme.lower() == "basic" and is_own_origin(scope):
        key = _password(credentials)
    elif not scheme:
        key = header_value(scope, b"x-api-key")  # sent by Anthropic's clients; no page of another site can send it
    else:
        return None
    return key.strip()


def _is_page(path: str) -> bool:
    """Return whether people open this path in a browser, which can only ask for a name and a password."""
    return path in ("/", "/docs") or path.startswith("/dashboard/")


def is_own_origin(scope: Scope) -> bool:
    """Return whether the request comes from our own origin, and not from a page of another site."""
    if header_value(scope, b"sec-fetch-site") in ("cross-site", "same-site"):
        return False
    origin = header_value(scope, b"origin")
    return not origin or origin.partition("://")[2] == header_value(scope, b"host")


def _password(credentials: str) -> str:
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:  # includes the errors of `binascii` and of decoding
        return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
