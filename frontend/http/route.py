"""`ApiRoute`: FastAPI's route with bounded bodies, our error bodies, and cancellation when the client disconnects.

FastAPI still matches the route, resolves its dependencies (including those of an embedding application) and describes
it.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Coroutine
from http import HTTPStatus
from typing import Any, ClassVar, TypeAlias

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.frontend.http.app_state import AppState
from octavo.frontend.http.auth import is_own_origin
from octavo.frontend.http.body_reader import BodyReader, BodyRejected
from octavo.frontend.http.disconnect import CancelOnDisconnect
from octavo.frontend.http.errors import failure_response, rejection
from octavo.frontend.http.model_choice import choose_state
from octavo.frontend.http.request import ApiRequest, RequestBody, header_value
from octavo.protocol.errors import OctavoError

APP_STATE = "octavo.app_state"
"""Key in the ASGI scope."""

FORM = "multipart/form-data"

_STREAMS_BODY = "streams_body"
"""Attribute that `streams_body` sets."""

Endpoint: TypeAlias = Callable[..., Coroutine[Any, Any, Response]]


def streams_body(endpoint: Endpoint) -> Endpoint:
    """Mark an endpoint that reads its body itself, with a limit of its own: a file may be longer than other bodies."""
    setattr(endpoint, _STREAMS_BODY, True)
    return endpoint


class ApiRoute(APIRoute):
    """A route of the engine's API. `bound_to` creates the class that a router uses."""

    app_state: ClassVar[AppState]
    body_reader: ClassVar[BodyReader]
    allowed_origins: ClassVar[Collection[str]]
    """Origins whose pages may upload files; "*" means all."""
    is_included: ClassVar[bool]
    """Whether an embedding application includes the route. It may have added dependencies."""

    @classmethod
    def bound_to(
        cls,
        app_state: AppState,
        max_body_bytes: int,
        *,
        is_included: bool = True,
        allowed_origins: Collection[str] = (),
    ) -> "type[ApiRoute]":
        """Return a class for the routes of one engine.

        A class instead of an instance, because FastAPI may create new routes when it includes a router.
        """
        members = {
            "app_state": app_state,
            "body_reader": BodyReader(max_body_bytes),
            "is_included": is_included,
            "allowed_origins": allowed_origins,
        }
        return type("ApiRoute", (cls,), members)

    def __init__(self, path: str, endpoint: Endpoint, **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self._streams_body = getattr(endpoint, _STREAMS_BODY, False)
        self._body_types = (self.openapi_extra or {}).get("requestBody", {}).get("content", {})
        self._parameters = tuple(inspect.signature(endpoint).parameters)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, with our request class and our error responses."""
        handle = super().get_route_handler()

        async def handle_request(request: Request) -> Response:
            try:
                return await handle(ApiRequest(request.scope, request.receive))
            except OctavoError as error:
                return failure_response(request.scope, error)

        return handle_request

    async def handle(self, scope: Scope, receive: Receive, send: Send, *, is_alone: bool = False) -> None:
        """Receive the body, and run the handler until it is done or the client disconnects.

        Args:
            scope: the ASGI scope of the request.
            receive: the ASGI receive function of the server.
            send: the ASGI send function of the server.
            is_alone: whether no other layer of the application reads the scope from now on.
        """
        if self.methods and scope["method"] not in self.methods:
            await super().handle(scope, receive, send)
            return
        scope[APP_STATE] = self.app_state
        if self._streams_body:
            if not self._is_allowed_origin(scope):
                await _origin_rejection(scope)(scope, receive, send)
            elif self.is_included or scope["app"].dependency_overrides:
                await super().handle(scope, receive, send)
            else:
                response = await self._respond(ApiRequest(scope, receive))
                await response(scope, receive, send)
            return
        if rejected := self._rejection(scope):
            await rejected(scope, receive, send)
            return
        try:
            body = await self.body_reader.read(receive)
        except BodyRejected as error:
            await error.response(scope)(scope, receive, send)
            return
        if body is None:
            return
        if self.app_state.others:
            try:
                scope[APP_STATE] = await choose_state(self.app_state, self.path, scope, body)
            except OctavoError as error:
                await failure_response(scope, error)(scope, receive, send)
                return
        received = RequestBody(body, receive)
        del body  # the handler may free it
        received.put_into(scope)
        with CancelOnDisconnect(receive) as watch:
            send = watch.ending_with_response(send)
            if self.is_included or scope["app"].dependency_overrides:
                await super().handle(scope, received, send)
            else:
                response = await self._respond(ApiRequest(scope, received))
                if is_alone and watch.is_direct:
                    scope["headers"] = ()  # the headers take some kilobytes, and the request may wait for long
                await response(scope, received, send)

    async def _respond(self, request: ApiRequest) -> Response:
        """Run the handler without FastAPI's dependency resolution, which takes longer than everything else in HTTP."""
        arguments = {name: request.scope[APP_STATE] if name == "state" else request for name in self._parameters}
        try:
            response: Response = await self.endpoint(**arguments)
        except OctavoError as error:
            response = failure_response(request.scope, error)
        return response

    def _is_allowed_origin(self, scope: Scope) -> bool:
        """Return False if the page of another origin sends a form. Browsers send forms without a preflight."""
        allowed = self.allowed_origins
        return "*" in allowed or is_own_origin(scope) or header_value(scope, b"origin") in allowed

    def _rejection(self, scope: Scope) -> Response | None:
        """Return the error response if the headers already show that the request is invalid, else `None`."""
        if FORM in self._body_types:
            if not self._is_allowed_origin(scope):
                return _origin_rejection(scope)
            if header_value(scope, b"content-type").partition(";")[0].strip().lower() != FORM:
                message = f"the body must be a form, sent as Content-Type: {FORM}"
                return rejection(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, scope=scope)
        elif self._body_types and not _is_json(header_value(scope, b"content-type")):
            # A web page of another origin can send any other content type to a local server without a preflight
            # request.
            message = "the body must be sent as Content-Type: application/json"
            return rejection(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, scope=scope)
        error = self.body_reader.rejected_length(header_value(scope, b"content-length"))
        return None if error is None else error.response(scope)


def _origin_rejection(scope: Scope) -> Response:
    message = "a page of another origin may upload files only if --allowed-origins names it"
    return rejection(HTTPStatus.FORBIDDEN, message, scope=scope)


def _is_json(content_type: str) -> bool:
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


def answer_failures(endpoint: Endpoint) -> Endpoint:
    """Return an endpoint that sends an error response for an unexpected error before the error reaches the log.

    Errors of dependencies are left to the application, which may have handlers for them.
    """

    @functools.wraps(endpoint)
    async def answering(*args: Any, **kwargs: Any) -> Response:
        try:
            return await endpoint(*args, **kwargs)
        except OctavoError:
            raise
        except Exception as error:
            return _FailureResponse(error)

    return answering


class _FailureResponse(Response):
    """Sends the response to an unexpected error, then raises it."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await failure_response(scope, self._error)(scope, receive, send)
        raise self._error
