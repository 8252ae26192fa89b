"""`build_app`: the route table, as data. The handlers are in `routes/`; nothing here knows an engine's inside."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.frontend.http.auth import RequireApiKey
from octavo.frontend.http.errors import add_error_handlers
from octavo.frontend.http.routes.chat import create_chat_completion
from octavo.frontend.http.routes.completions import create_completion
from octavo.frontend.http.routes.health import health, metrics, version
from octavo.frontend.http.routes.models import list_models, retrieve_model
from octavo.frontend.http.routes.tokenize import detokenize, tokenize
from octavo.frontend.http.schemas.chat import ChatCompletion, ChatCompletionRequest
from octavo.frontend.http.schemas.completions import CompletionRequest, CompletionResponse
from octavo.frontend.http.schemas.models import ModelCard, ModelList
from octavo.frontend.http.schemas.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from octavo.frontend.http.serving import Serving

_REF = "#/components/schemas/{name}"


@dataclass(frozen=True)
class Route:
    """One entry of the table: who answers what."""

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    request: type[msgspec.Struct] | None = None
    """Schema of the body, for the documentation at `/docs`."""
    response: type[msgspec.Struct] | None = None


ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/chat/completions", create_chat_completion, ChatCompletionRequest, ChatCompletion),
    Route("POST", "/v1/completions", create_completion, CompletionRequest, CompletionResponse),
    Route("GET", "/v1/models", list_models, response=ModelList),
    Route("GET", "/v1/models/{model_id:path}", retrieve_model, response=ModelCard),
    Route("POST", "/tokenize", tokenize, TokenizeRequest, TokenizeResponse),
    Route("POST", "/detokenize", detokenize, DetokenizeRequest, DetokenizeResponse),
    Route("GET", "/health", health),
    Route("GET", "/ping", health),
    Route("POST", "/ping", health),
    Route("GET", "/version", version),
    Route("GET", "/metrics", metrics),
)


def build_app(serving: Serving, api_keys: Sequence[str] = ()) -> FastAPI:
    """Return the ASGI application.

    Args:
        serving: what the routes answer from.
        api_keys: the accepted ones; none: everybody is let in.
    """
    app = FastAPI(title="octavo", version=__version__, redoc_url=None)
    app.state.serving = serving
    for route in ROUTES:
        app.add_api_route(
            route.path,
            route.handler,
            methods=[route.method],
            # FastAPI is to take the handlers as they are: bodies are msgspec's business.
            response_model=None,
            openapi_extra=_documentation(route),
            operation_id=f"{route.method} {route.path}",
        )
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    add_error_handlers(app)
    if api_keys:
        app.add_middleware(RequireApiKey, keys=api_keys)
    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the description behind `/docs`: FastAPI's of the routes, msgspec's of the bodies."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        bodies = [body for route in ROUTES for body in (route.request, route.response) if body is not None]
        _, schemas = msgspec.json.schema_components(bodies, ref_template=_REF)
        document["components"] = {"schemas": schemas}
        app.openapi_schema = document
    return app.openapi_schema


def _documentation(route: Route) -> dict[str, Any]:
    """Return the OpenAPI description of a route's bodies."""
    described: dict[str, Any] = {}
    if route.request is not None:
        described["requestBody"] = {"required": True, "content": _content(route.request)}
    if route.response is not None:
        described["responses"] = {"200": {"description": "Success", "content": _content(route.response)}}
    return described


def _content(body: type[msgspec.Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=body.__name__)}}}
