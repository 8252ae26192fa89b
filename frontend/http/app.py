"""`App`: the route table, as data, and the way from a request to its handler and from an error to its response.

The handlers are in `routes/`; nothing here knows an engine's inside.
"""

import logging
from collections.abc import Sequence
from functools import cached_property
from http import HTTPStatus
from typing import Any

import msgspec

from octavo.frontend.dashboard.routes import DASHBOARD_ROUTES
from octavo.frontend.http.auth import ApiKeys
from octavo.frontend.http.cors import Cors
from octavo.frontend.http.docs_page import render_page
from octavo.frontend.http.errors import error_response, refusal, status_of
from octavo.frontend.http.message import JSON, Request, Response
from octavo.frontend.http.openapi import describe
from octavo.frontend.http.route import Route
from octavo.frontend.http.routes.chat import create_chat_completion
from octavo.frontend.http.routes.completions import create_completion
from octavo.frontend.http.routes.engine import load, reset_prefix_cache, server_info, start_profile, stop_profile
from octavo.frontend.http.routes.health import health, metrics, version
from octavo.frontend.http.routes.models import list_models, retrieve_model
from octavo.frontend.http.routes.tokenize import detokenize, tokenize, tokenizer_info
from octavo.frontend.http.schemas.chat import ChatCompletion, ChatCompletionRequest
from octavo.frontend.http.schemas.completions import CompletionRequest, CompletionResponse
from octavo.frontend.http.schemas.engine import Done, Load, ServerInfo, Version
from octavo.frontend.http.schemas.models import ModelCard, ModelList
from octavo.frontend.http.schemas.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from octavo.frontend.http.serving import Serving
from octavo.protocol.errors import OctavoError

logger = logging.getLogger(__name__)

ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/chat/completions", create_chat_completion, ChatCompletionRequest, ChatCompletion, streams=True),
    Route("POST", "/v1/completions", create_completion, CompletionRequest, CompletionResponse, streams=True),
    Route("GET", "/v1/models", list_models, response=ModelList),
    Route("GET", "/v1/models/{model_id:path}", retrieve_model, response=ModelCard, failures=(404,)),
    Route("POST", "/tokenize", tokenize, TokenizeRequest, TokenizeResponse),
    Route("POST", "/detokenize", detokenize, DetokenizeRequest, DetokenizeResponse),
    Route("GET", "/health", health, failures=(503,)),
    Route("GET", "/ping", health, failures=(503,)),
    Route("POST", "/ping", health, failures=(503,)),
    Route("GET", "/version", version, response=Version),
    Route("GET", "/metrics", metrics, media_type="text/plain"),
    Route("GET", "/load", load, response=Load),
    Route("GET", "/server_info", server_info, response=ServerInfo),
    Route("POST", "/reset_prefix_cache", reset_prefix_cache, response=Done, failures=(409,)),
    Route("POST", "/start_profile", start_profile, response=Done, failures=(400,)),
    Route("POST", "/stop_profile", stop_profile, response=Done, failures=(400,)),
)

TOKENIZER_INFO = Route("GET", "/tokenizer_info", tokenizer_info, response=TokenizerInfo)
"""For servers that tell: it may say what their owner keeps to himself."""


class App:
    """Answers requests, whatever connection they came on.

    Args:
        serving: what the routes answer from.
        api_keys: the accepted ones; none: everybody is let in.
        cors: for pages of other origins.
        root_path: under which a proxy offers the application; requests come with or without it.
        names_requests: answers carry `X-Request-Id`.
        has_docs: `/docs` and `/openapi.json` are there.
        has_tokenizer_info: `/tokenizer_info` is there.
    """

    def __init__(
        self,
        serving: Serving,
        api_keys: Sequence[str] = (),
        *,
        cors: Cors | None = None,
        root_path: str = "",
        names_requests: bool = True,
        has_docs: bool = True,
        has_tokenizer_info: bool = False,
    ) -> None:
        self.serving = serving
        self._api_keys = ApiKeys(api_keys)
        self._cors = cors or Cors()
        self._root_path = root_path.rstrip("/")
        self._names_requests = names_requests
        docs = [Route("GET", "/openapi.json", self._document), Route("GET", "/docs", self._page)]
        self._public = [*ROUTES, *([TOKENIZER_INFO] if has_tokenizer_info else [])]
        table = [*self._public, *DASHBOARD_ROUTES, *(docs if has_docs else [])]
        self._fixed = {(route.method, route.path): route for route in table if not route.variables}
        self._variable = [route for route in table if route.variables]

    def screen(self, request: Request) -> Response | None:
        """Return the answer to a request that needs no more than its head, None when its body is worth reading."""
        if self._root_path and request.path == self._root_path:
            # The page there names its files from its own place, which needs the slash.
            return Response(status=HTTPStatus.TEMPORARY_REDIRECT, headers={"location": self._root_path + "/"})
        if self._root_path and request.path.startswith(self._root_path + "/"):
            request.path = request.path.removeprefix(self._root_path)
        # A browser asks what a page may do without the key that the page may have.
        if answer := self._cors.preflight(request) or self._api_keys.refusal(request):
            return answer
        return None if self._find(request) else self._no_route(request)

    def headers(self, request: Request) -> dict[str, str]:
        """Return what the head of every answer to this request also says."""
        headers = self._cors.headers(request)
        if self._names_requests:
            headers["x-request-id"] = request.request_id
        return headers

    async def answer(self, request: Request) -> Response:
        """Return the handler's answer, or that of the error it raises."""
        route = self._find(request)
        if route is None:
            return self._no_route(request)
        try:
            return await route.handler(self.serving, request)
        except OctavoError as error:
            return self.failure(request, error)

    def failure(self, request: Request, error: Exception) -> Response:
        """Return the answer to a request that ended in an error; one that is ours is logged."""
        if status_of(error) is HTTPStatus.INTERNAL_SERVER_ERROR:
            logger.error("%s %s failed: %s", request.method, request.path, error)
        return error_response(error)

    def _find(self, request: Request) -> Route | None:
        # To a HEAD belongs the head that a GET would get; the server leaves the body out.
        method = "GET" if request.method == "HEAD" else request.method
        if route := self._fixed.get((method, request.path)):
            return route
        for route in self._variable:
            if route.method == method and (found := route.match(request.path)) is not None:
                request.variables = found
                return route
        return None

    def _no_route(self, request: Request) -> Response:
        """Tell an unknown path from a known one that does not take this method, or is asked which ones it takes."""
        methods = [method for method, path in self._fixed if path == request.path]
        methods += [route.method for route in self._variable if route.match(request.path) is not None]
        if not methods:
            return refusal(HTTPStatus.NOT_FOUND, f"there is no route {request.path}")
        allow = {"allow": ", ".join([*methods, *(["HEAD"] if "GET" in methods else []), "OPTIONS"])}
        if request.method == "OPTIONS":
            return Response(status=HTTPStatus.NO_CONTENT, headers=allow)
        return refusal(HTTPStatus.METHOD_NOT_ALLOWED, f"{request.path} does not answer to {request.method}", allow)

    @cached_property
    def _description(self) -> dict[str, Any]:
        return describe(self._public, self._root_path)

    async def _document(self, serving: Serving, request: Request) -> Response:
        return Response(msgspec.json.encode(self._description), media_type=JSON)

    async def _page(self, serving: Serving, request: Request) -> Response:
        page = render_page(self._description)
        headers = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return Response(page.encode(), headers=headers, media_type="text/html; charset=utf-8")
