"""`App`: the route table, as data, and the way from a request to its handler and from an error to its response.

The handlers are in `routes/`; nothing here knows an engine's inside.
"""

import logging
from collections.abc import Sequence
from functools import cached_property
from http import HTTPStatus

from octavo.frontend.http.auth import ApiKeys
from octavo.frontend.http.errors import error_response, refusal, status_of
from octavo.frontend.http.message import JSON, Request, Response
from octavo.frontend.http.openapi import DOCUMENT_PATH, PAGE, describe
from octavo.frontend.http.route import Route
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
from octavo.protocol.errors import OctavoError

logger = logging.getLogger(__name__)

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


class App:
    """Answers requests, whatever connection they came on.

    Args:
        serving: what the routes answer from.
        api_keys: the accepted ones; none: everybody is let in.
    """

    def __init__(self, serving: Serving, api_keys: Sequence[str] = ()) -> None:
        self.serving = serving
        self._api_keys = ApiKeys(api_keys)
        table = (*ROUTES, Route("GET", DOCUMENT_PATH, self._document), Route("GET", "/docs", self._page))
        self._fixed = {(route.method, route.path): route for route in table if not route.variables}
        self._variable = [route for route in table if route.variables]

    def screen(self, request: Request) -> Response | None:
        """Return the answer to a request that its head already refuses, None when its body is worth reading."""
        if refused := self._api_keys.refusal(request):
            return refused
        return None if self._find(request) else self._no_route(request)

    async def answer(self, request: Request) -> Response:
        """Return the handler's answer, or that of the error it raises."""
        route = self._find(request)
        if route is None:
            return self._no_route(request)
        try:
            return await route.handler(self.serving, request)
        except (OctavoError, NotImplementedError) as error:
            return self.failure(request, error)

    def failure(self, request: Request, error: Exception) -> Response:
        """Return the answer to a request that ended in an error; one that is ours is logged."""
        if status_of(error) is HTTPStatus.INTERNAL_SERVER_ERROR:
            logger.error("%s %s failed: %s", request.method, request.path, error)
        return error_response(error)

    def _find(self, request: Request) -> Route | None:
        if route := self._fixed.get((request.method, request.path)):
            return route
        for route in self._variable:
            if route.method == request.method and (found := route.match(request.path)) is not None:
                request.variables = found
                return route
        return None

    def _no_route(self, request: Request) -> Response:
        """Tell an unknown path from a known one that does not take this method."""
        methods = [method for method, path in self._fixed if path == request.path]
        methods += [route.method for route in self._variable if route.match(request.path) is not None]
        if not methods:
            return refusal(HTTPStatus.NOT_FOUND, f"there is no route {request.path}")
        message = f"{request.path} does not answer to {request.method}"
        return refusal(HTTPStatus.METHOD_NOT_ALLOWED, message, {"allow": ", ".join(methods)})

    @cached_property
    def _description(self) -> bytes:
        return describe(ROUTES)

    async def _document(self, serving: Serving, request: Request) -> Response:
        return Response(self._description, media_type=JSON)

    async def _page(self, serving: Serving, request: Request) -> Response:
        return Response(PAGE.encode(), media_type="text/html; charset=utf-8")
