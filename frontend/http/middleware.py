"""ASGI middleware around the whole application: request ids, the root path, HEAD, and classes named by `--middleware`.

perf: our middleware returns the awaitable of the wrapped application. A coroutine would keep a frame for each request.
"""

import inspect
from collections.abc import Awaitable, Iterable
from importlib import import_module
from typing import Any, cast

from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.frontend.http.errors import is_messages_path
from octavo.frontend.http.request import RequestId, route_path
from octavo.protocol.errors import ConfigError


class RequestIdMiddleware:
    """Adds `X-Request-Id` to every response, and `request-id` for clients of Anthropic's API, which read that."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Handle one request."""
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        request_id = RequestId.of(scope)

        def send_with_id(message: Message) -> Any:
            if message["type"] == "http.response.start":
                value = request_id.text.encode("latin-1")
                names = [b"x-request-id", *([b"request-id"] if is_messages_path(route_path(scope)) else [])]
                # A copy: a response may be sent again, and owns its list.
                message["headers"] = [*message["headers"], *((name, value) for name in names)]
            return send(message)

        return self._app(scope, receive, send_with_id)


class PathMiddleware:
    """Handles HEAD like GET, and redirects the root path without a trailing slash to the page at that path.

    The page refers to its files by relative URLs, which need the slash.

    Args:
        app: the application.
        root_path: path prefix under which a proxy serves the application; requests may arrive with or without it. A
            mounted application has the root path of its mount instead.
    """

    def __init__(self, app: ASGIApp, root_path: str = "") -> None:
        self._app = app
        self._root_path = root_path.rstrip("/")

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Handle one request."""
        if scope["type"] == "http":
            root_path = scope["root_path"] = scope.get("root_path") or self._root_path
            if root_path and scope["path"] == root_path:
                return RedirectResponse(root_path + "/")(scope, receive, send)
            if scope["method"] == "HEAD":  # in a copy: the server omits the body because of the method in its own scope
                scope = {**scope, "method": "GET"}
        return self._app(scope, receive, send)


def load_middleware(names: Iterable[str]) -> list[Middleware]:
    """Return the middleware that the user names, outermost first: the last name wraps all names before it.

    Args:
        names: `module.Class` for an ASGI middleware, or `module.function` for a coroutine function that takes the
        request and `call_next`.

    Raises:
        ConfigError: the object does not exist, or is neither kind.
    """
    return [_load(name) for name in names][::-1]


def _load(name: str) -> Middleware:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--middleware {name} cannot be loaded: {error}",
            hint="use module.Class, with the module on Python's path (PYTHONPATH)",
        ) from None
    if inspect.isclass(found):
        return Middleware(cast(Any, found))
    if inspect.iscoroutinefunction(found):
        return Middleware(BaseHTTPMiddleware, dispatch=found)
    raise ConfigError(
        f"--middleware {name} is neither a class nor a coroutine function",
        hint="name an ASGI middleware class, or async def f(request, call_next)",
    )
