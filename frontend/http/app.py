"""`create_app`: the whole server as a FastAPI application, with its pages, API keys, CORS and middleware."""

from collections.abc import Awaitable, Sequence
from dataclasses import replace
from http import HTTPStatus

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.frontend.calls.middleware import CallMiddleware, TenantLimits
from octavo.frontend.calls.services import CallServices
from octavo.frontend.client import AsyncClient
from octavo.frontend.dashboard.routes import add_dashboard_routes
from octavo.frontend.http.app_state import AppState
from octavo.frontend.http.auth import ApiKeyMiddleware
from octavo.frontend.http.configure import admin_keys, api_keys, has_dev_routes, make_app_state, require_no_batches
from octavo.frontend.http.docs_page import render_page
from octavo.frontend.http.errors import failure_response, rejection
from octavo.frontend.http.middleware import PathMiddleware, RequestIdMiddleware, load_middleware
from octavo.frontend.http.openapi import DESCRIPTION, Document, share_schemas
from octavo.frontend.http.request import header_value, route_path
from octavo.frontend.http.route import ApiRoute
from octavo.frontend.http.router import add_admin_routes, add_dev_routes, add_routes
from octavo.frontend.http.sse import DIRECT_SEND
from octavo.frontend.lora.startup import require_no_modules
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import OctavoError
from octavo.protocol.version import __version__

PREFLIGHT_MAX_AGE_S = 600
"""Seconds that a browser may cache the response to a preflight request."""


def create_app(client: AsyncClient, config: ServerConfig | None = None) -> FastAPI:
    """Return an application that serves one engine as `octavo serve` does, to run or to mount.

    Args:
        client: the engine's client; its owner closes it. It gets an observer that counts for `/metrics`, unless it has
        one.
        config: the server's configuration; None: the defaults. Without API keys in it, those of the environment are
        used.

    Raises:
        ConfigError: the configuration has `lora_modules` or `batch_dir`, or names a parser, a template, a directory or
            a middleware that cannot be used.
    """
    config = config or ServerConfig()
    require_no_modules(config)
    require_no_batches(config)
    services = CallServices.open(config, client.config)
    return make_app(replace(make_app_state(client, config), calls=services), config, api_keys(config))


def make_app(state: AppState, config: ServerConfig, keys: Sequence[str] | None) -> FastAPI:
    """Return the application that the configuration describes.

    Args:
        state: shared by the routes.
        config: the server's configuration.
        keys: the accepted API keys; empty: no key is required. None: the requests were accepted before they arrive
        here, so neither keys nor limits are checked.
    """
    app = OctavoApp(
        title="octavo",
        version=__version__,
        description=DESCRIPTION,
        openapi_url=None,  # added below, with our docs page
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # checked for each request; octavo has /metrics
        middleware=_middleware(config, keys, state.calls),
        exception_handlers={
            HTTPException: _http_exception,
            OctavoError: _failure,
            Exception: _failure,
        },
    )
    app.state.octavo = state
    app.router.route_class = ApiRoute.bound_to(
        state, config.max_request_body_bytes, is_included=False, allowed_origins=_allowed_origins(config)
    )
    add_routes(app.router, config)
    if has_dev_routes(config):
        add_dev_routes(app.router)
    if state.execute and admin_keys(config):
        add_admin_routes(app.router)
    add_dashboard_routes(app.router)
    app.router.route_class = APIRoute  # for routes that the application's owner adds
    if not config.disable_fastapi_docs:
        app.routes.extend([Route("/openapi.json", app.send_document), Route("/docs", app.send_page)])
    return app


class OctavoApp(FastAPI):
    """FastAPI with a documentation page that needs no scripts and no other host."""

    _shared: tuple[Document, Document] | None = None
    """FastAPI's OpenAPI document, and ours made from it."""

    def build_middleware_stack(self) -> ASGIApp:
        """Return FastAPI's middleware stack. If all middleware is ours, our first routes bypass FastAPI's layers."""
        ours = self.user_middleware
        if not all(one.cls in _OWN_MIDDLEWARE for one in ours):
            return super().build_middleware_stack()
        self.user_middleware = []
        app: ASGIApp = _DirectRoutes(self, super().build_middleware_stack())
        self.user_middleware = ours
        for cls, args, kwargs in reversed(ours):
            app = cls(app, *args, **kwargs)

        def offer_direct_send(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
            scope[DIRECT_SEND] = send  # our middleware inspects only the start of a response
            return app(scope, receive, send)

        return offer_direct_send

    def openapi(self) -> Document:
        """Return the OpenAPI document, with each schema once."""
        document = super().openapi()
        if self._shared is None or self._shared[0] is not document:
            self._shared = document, share_schemas(document)
        return self._shared[1]

    async def send_document(self, request: Request) -> Response:
        """Handle `/openapi.json`."""
        return JSONResponse(self._served(request))

    async def send_page(self, request: Request) -> Response:
        """Handle `/docs`."""
        policy = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return HTMLResponse(render_page(self._served(request)), headers=policy)

    def _served(self, request: Request) -> Document:
        return {**self.openapi(), "servers": [{"url": request.scope.get("root_path") or "/"}]}


class _DirectRoutes:
    """Calls a route without FastAPI's layers, which take longer than all other HTTP work and are not needed here.

    It applies to octavo's routes, which handle their own errors, while the application's owner has added nothing that
    comes before them: no middleware, route, dependency override or mount.

    Args:
        owner: the application.
        app: the application's other routes, with all layers around them.
    """

    def __init__(self, owner: FastAPI, app: ASGIApp) -> None:
        self._owner = owner
        self._app = app
        self._routes: dict[tuple[str, str], ApiRoute] = {}
        for route in owner.router.routes:
            if not isinstance(route, ApiRoute) or route.param_convertors:
                break  # its path may match the paths of routes behind it
            for method in route.methods or ():
                self._routes.setdefault((method, route.path), route)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Handle one request."""
        is_plain = scope["type"] == "http" and "router" not in scope and not self._owner.dependency_overrides
        route = self._routes.get((scope["method"], route_path(scope))) if is_plain else None
        if route is None:
            scope.pop(DIRECT_SEND, None)  # a mounted application may have middleware that reads every message
            return self._app(scope, receive, send)
        return route.handle(scope, receive, send, is_alone=True)


class _CorsMiddleware(CORSMiddleware):
    """Skips requests without an Origin header. Otherwise it would wrap every message of every stream."""

    def __call__(  # type: ignore[override]
        self, scope: Scope, receive: Receive, send: Send
    ) -> Awaitable[None]:
        """Handle one request."""
        is_from_page = scope["type"] == "http" and header_value(scope, b"origin") != ""
        return (super().__call__ if is_from_page else self.app)(scope, receive, send)


_OWN_MIDDLEWARE: tuple[object, ...] = (
    *(RequestIdMiddleware, _CorsMiddleware, PathMiddleware),
    *(CallMiddleware, ApiKeyMiddleware, TenantLimits),
)


def _middleware(config: ServerConfig, keys: Sequence[str] | None, calls: CallServices) -> list[Middleware]:
    """Return the middleware, outermost first."""
    found = load_middleware(config.middleware or ())
    if config.enable_request_id_headers:
        found.append(Middleware(RequestIdMiddleware))
    if origins := _allowed_origins(config):
        cors = Middleware(
            _CorsMiddleware,
            allow_origins=origins,
            allow_methods=config.allowed_methods if config.allowed_methods is not None else ["*"],
            allow_headers=config.allowed_headers if config.allowed_headers is not None else ["*"],
            allow_credentials=config.allow_credentials,
            expose_headers=["X-Request-Id", "Retry-After"],
            max_age=PREFLIGHT_MAX_AGE_S,
        )
        found.append(cors)
    found.append(Middleware(PathMiddleware, root_path=config.root_path or ""))
    if calls.is_any_enabled:
        found.append(Middleware(CallMiddleware, services=calls))
    if keys is None:
        return found
    operators = admin_keys(config)
    if keys or operators or calls.tenants:
        tenants = calls.tenants.file if calls.tenants else None
        found.append(Middleware(ApiKeyMiddleware, keys=keys, admin_keys=operators, tenants=tenants))
    if calls.tenants:
        found.append(Middleware(TenantLimits, tenants=calls.tenants))
    return found


def _allowed_origins(config: ServerConfig) -> list[str]:
    return ["*"] if config.allowed_origins is None else config.allowed_origins


async def _failure(request: Request, error: Exception) -> Response:
    return failure_response(request.scope, error)


async def _http_exception(request: Request, error: Exception) -> Response:
    """Return the error in our format, and distinguish an unknown path from a wrong method."""
    assert isinstance(error, HTTPException)
    path = route_path(request.scope)
    if error.status_code == HTTPStatus.NOT_FOUND:
        return rejection(HTTPStatus.NOT_FOUND, f"there is no route {path}")
    if error.status_code != HTTPStatus.METHOD_NOT_ALLOWED:
        return rejection(error.status_code, str(error.detail), error.headers)
    methods = _methods(request)
    allow = {"allow": ", ".join([*methods, *(["HEAD"] if "GET" in methods else []), "OPTIONS"])}
    if request.method == "OPTIONS":
        return Response(status_code=HTTPStatus.NO_CONTENT, headers=allow)
    message = f"{path} does not answer to {request.method}"
    return rejection(HTTPStatus.METHOD_NOT_ALLOWED, message, allow, request.scope)


def _methods(request: Request) -> list[str]:
    """Return the methods that a request's path supports."""
    return [
        method
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        if any(
            route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.router.routes
        )
    ]
