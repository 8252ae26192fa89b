"""Maps exceptions to error responses: one table for every route.

The body is OpenAI's: `{"error": {"message", "type", "param", "code"}}`; below `/v1/messages` it is Anthropic's:
`{"type": "error", "error": {"type", "message"}, "request_id"}`.
"""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Literal

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from octavo.frontend.http.request import JSON, RequestId, route_path
from octavo.protocol.errors import (
    ConflictError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    RequestFailedError,
)

logger = logging.getLogger(__name__)
"""Logs the traceback of every error response at DEBUG level: most errors are the clients' own."""

NEUTRAL_MESSAGE = "The server had an error while processing your request."
"""Message of internal errors; the log has the cause."""

RETRY_AFTER_S = 1

_STATUS: dict[type[Exception], HTTPStatus] = {
    InvalidRequestError: HTTPStatus.BAD_REQUEST,
    ModelNotFoundError: HTTPStatus.NOT_FOUND,
    OverloadedError: HTTPStatus.SERVICE_UNAVAILABLE,
    ConflictError: HTTPStatus.CONFLICT,
    RequestFailedError: HTTPStatus.INTERNAL_SERVER_ERROR,
    EngineDeadError: HTTPStatus.INTERNAL_SERVER_ERROR,
    Exception: HTTPStatus.INTERNAL_SERVER_ERROR,
}

_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.METHOD_NOT_ALLOWED: "MethodNotAllowedError",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "RequestTooLargeError",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "RequestTooLargeError",
    HTTPStatus.CONFLICT: "ConflictError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
}

_MESSAGES_PATH = "/v1/messages"

_MESSAGES_TYPES = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "api_error",
}

_REQUEST_FIELDS = {"extra_args": "vllm_xargs"}
"""Sampling parameters that have another name in request bodies, on every route."""

_SAYS_ITS_CAUSE = (
    *(InvalidRequestError, ModelNotFoundError, OverloadedError),
    *(ConflictError, RequestFailedError, EngineDeadError),
)


class BodyError(InvalidRequestError):
    """A body that does not match its schema."""

    kind = "Bad Request"


class ErrorDetail(msgspec.Struct):
    """An error, as text and as codes."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct):
    """The body of every error response except 401."""

    error: ErrorDetail


class MessagesError(msgspec.Struct):
    """The error, as a code and as text."""

    type: str
    message: str


class MessagesErrorBody(msgspec.Struct, kw_only=True):
    """The body of every error response of Anthropic's Messages API."""

    type: Literal["error"] = "error"
    error: MessagesError
    request_id: str


def status_of(error: Exception) -> HTTPStatus:
    """Return the HTTP status of an error."""
    return next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)


def public_message(error: Exception) -> str:
    """Return the message about an error that a client may see."""
    return str(error) if isinstance(error, _SAYS_ITS_CAUSE) else NEUTRAL_MESSAGE


def error_body(error: Exception) -> bytes:
    """Return the JSON body of an error."""
    logger.debug("error response: %s", type(error).__name__, exc_info=error)
    message = public_message(error)
    param = getattr(error, "param", None)
    if param in _REQUEST_FIELDS:
        message = message.replace(param, _REQUEST_FIELDS[param], 1)
        param = _REQUEST_FIELDS[param]
    return _encode(status_of(error), message, param, getattr(error, "kind", ""))


def error_response(error: Exception, scope: Scope | None = None) -> Response:
    """Return the response to a request that ended in `error`; without a scope the body is OpenAI's."""
    status = status_of(error)
    headers = {"retry-after": str(RETRY_AFTER_S)} if status is HTTPStatus.SERVICE_UNAVAILABLE else None
    body = error_body(error) if scope is None else failure_body(scope, error)
    return Response(body, status.value, headers, JSON)


def failure_body(scope: Scope, error: Exception) -> bytes:
    """Return the JSON body of an error, in the format of the API that the request used."""
    if not is_messages_path(route_path(scope)):
        return error_body(error)
    logger.debug("error response: %s", type(error).__name__, exc_info=error)
    return messages_error_body(status_of(error), public_message(error), RequestId.of(scope).text)


def is_messages_path(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API."""
    return path == _MESSAGES_PATH or path.startswith(_MESSAGES_PATH + "/")


def messages_error_body(status: HTTPStatus, message: str, request_id: str) -> bytes:
    """Return the JSON body of an error of Anthropic's Messages API."""
    kind = _MESSAGES_TYPES.get(status, "invalid_request_error")
    return msgspec.json.encode(MessagesErrorBody(error=MessagesError(kind, message), request_id=request_id))


def failure_response(scope: Scope, error: Exception) -> Response:
    """Return the response to a failed request; log an internal error."""
    if status_of(error) is HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.error("%s %s failed: %s", scope["method"], scope["path"], error)
    return error_response(error, scope)


def rejection(
    status: int, message: str, headers: Mapping[str, str] | None = None, scope: Scope | None = None
) -> Response:
    """Return the error response to a request that no route handles, or only a route without a state."""
    if scope is not None and is_messages_path(route_path(scope)):
        body = messages_error_body(HTTPStatus(status), message, RequestId.of(scope).text)
    else:
        body = _encode(HTTPStatus(status), message, None)
    return Response(body, status, headers, JSON)


def _encode(status: HTTPStatus, message: str, param: str | None, kind: str = "") -> bytes:
    kind = kind or _TYPES.get(status, status.phrase.replace(" ", "") + "Error")
    return msgspec.json.encode(ErrorBody(ErrorDetail(message, kind, param, status.value)))
