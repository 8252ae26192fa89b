"""The description of the API, made from the route table and the schemas: nothing is said twice."""

import inspect
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from octavo import __version__
from octavo.frontend.http.errors import ErrorBody
from octavo.frontend.http.message import JSON
from octavo.frontend.http.route import Route
from octavo.frontend.http.schemas.engine import Unhealthy

_REF = "#/components/schemas/{name}"

_EVENTS = "text/event-stream"

_FAILURES = {
    HTTPStatus.BAD_REQUEST: "A field is wrong; `param` names it",
    HTTPStatus.UNAUTHORIZED: "The server has API keys, and the request has none of them",
    HTTPStatus.NOT_FOUND: "There is no such model here",
    HTTPStatus.CONFLICT: "Not while requests run",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body is longer than the server takes",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "The head is longer than the server takes",
    HTTPStatus.INTERNAL_SERVER_ERROR: "The server's fault; its log holds the cause",
    HTTPStatus.SERVICE_UNAVAILABLE: "Too many requests wait, or the engine does not answer; try again later",
}

_EVERYWHERE = (401, 431, 500)
_WITH_BODY = (400, 413)
_WITH_MODEL = (404, 503)

_UNAUTHORIZED = {"type": "object", "properties": {"error": {"const": "Unauthorized"}}, "required": ["error"]}


def describe(routes: Sequence[Route], root_path: str = "") -> dict[str, Any]:
    """Return the OpenAPI document.

    Args:
        routes: what is described.
        root_path: under which the routes are reached; "": at the root.
    """
    bodies = [body for route in routes for body in (route.request, route.response) if body is not None]
    _, schemas = msgspec.json.schema_components([*bodies, ErrorBody, Unhealthy], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.public_path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "octavo", "version": __version__, "description": _DESCRIPTION},
        "servers": [{"url": root_path or "/"}],
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


_DESCRIPTION = """\
The routes of OpenAI's API, and vLLM's beside them. Unknown fields of a request are ignored, with a line in the
server's log. Every answer carries X-Request-Id: the request's own, else a new one."""


def _operation(route: Route) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": (inspect.getdoc(route.handler) or "").split("\n")[0],
        "operationId": f"{route.method} {route.path}",
        "responses": {"200": _success(route)} | {str(status): _failure(route, status) for status in _statuses(route)},
    }
    if route.variables:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in route.variables
        ]
    if route.request is not None:
        described["requestBody"] = {"required": True, "content": _content(_ref(route.request))}
    return described


def _statuses(route: Route) -> list[int]:
    statuses = [*_EVERYWHERE, *route.failures]
    if route.request is not None:
        statuses += _WITH_BODY
        statuses += _WITH_MODEL
    return sorted(set(statuses))


def _success(route: Route) -> dict[str, Any]:
    success: dict[str, Any] = {
        "description": "Success",
        "headers": {"X-Request-Id": {"schema": {"type": "string"}}},
    }
    content = {}
    if route.response is not None:
        content = _content(_ref(route.response))
    elif route.media_type is not None:
        content = {route.media_type: {"schema": {"type": "string"}}}
    if route.streams:
        content[_EVENTS] = {"schema": {"type": "string"}}
    return success | {"content": content} if content else success


def _failure(route: Route, status: int) -> dict[str, Any]:
    if status == HTTPStatus.UNAUTHORIZED:
        schema: dict[str, Any] = _UNAUTHORIZED
    elif status == HTTPStatus.SERVICE_UNAVAILABLE and route.request is None:
        schema = _ref(Unhealthy)
    else:
        schema = _ref(ErrorBody)
    return {"description": _FAILURES[HTTPStatus(status)], "content": _content(schema)}


def _ref(body: type[msgspec.Struct]) -> dict[str, Any]:
    return {"$ref": _REF.format(name=body.__name__)}


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {JSON: {"schema": schema}}
