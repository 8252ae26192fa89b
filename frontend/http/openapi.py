"""The OpenAPI description of the routes, from the msgspec schemas that decode and encode their bodies.

The description of a route is self-contained, because it may become part of an embedding application's document. In our
own document each schema occurs once (`share_schemas`).
"""

from collections.abc import Mapping, Sequence
from functools import cache
from http import HTTPStatus
from typing import Any, TypeAlias

import msgspec

from octavo.frontend.http.errors import ErrorBody
from octavo.frontend.http.request import JSON
from octavo.frontend.http.schemas.engine import Unhealthy

Document: TypeAlias = dict[str, Any]

DESCRIPTION = """\
The routes of OpenAI's API, and vLLM's additional ones. Unknown fields of a request are ignored, with a line in the
server's log. Every response carries X-Request-Id: the request's own, else a new one."""

SECURITY: Document = {"security": [{}, {"key": []}]}
SECURITY_SCHEMES: Document = {"key": {"type": "http", "scheme": "bearer"}}

_REF = "#/components/schemas/"

_EVENTS = "text/event-stream"

_FAILURES = {
    HTTPStatus.BAD_REQUEST: "A field is wrong; `param` names it",
    HTTPStatus.UNAUTHORIZED: "The server requires an API key, and the request has no valid one",
    HTTPStatus.NOT_FOUND: "This server does not serve the model",
    HTTPStatus.CONFLICT: "Not while requests run",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body is larger than the server accepts",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "The body is not sent as JSON",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "Request line and headers are larger than the server accepts",
    HTTPStatus.INTERNAL_SERVER_ERROR: "The server's fault; its log holds the cause",
    HTTPStatus.SERVICE_UNAVAILABLE: "Too many requests wait, or the engine does not answer; try again later",
}

_EVERYWHERE = (401, 431, 500)
_WITH_BODY = (400, 413, 415)
_WITH_MODEL = (404, 503)

_UNAUTHORIZED = {"type": "object", "properties": {"error": {"const": "Unauthorized"}}, "required": ["error"]}

Schema: TypeAlias = type[msgspec.Struct]


def request_body(schema: Schema) -> Document:
    """Return the part of an operation that describes its JSON body."""
    return {"requestBody": {"required": True, "content": {JSON: {"schema": inlined(schema)}}}}


def path_parameter(name: str) -> Document:
    """Return the part of an operation that describes a variable in its path."""
    return {"parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]}


def responses(
    body: Schema | None = None,
    *,
    media_type: str | None = None,
    streams: bool = False,
    failures: Sequence[int] = (),
    has_request_body: bool = False,
    error: Schema = ErrorBody,
) -> dict[int | str, Document]:
    """Return the responses of an operation.

    Args:
        body: schema of a successful response, if it is JSON.
        media_type: media type of a successful response that is text; None for both: the response is empty.
        streams: a successful response may be a stream of events instead.
        failures: error statuses in addition to those of all routes, or of all routes with a body.
        has_request_body: whether the route decodes a request body.
        error: schema of error bodies.
    """
    success: Document = {"description": "Success", "headers": {"X-Request-Id": {"schema": {"type": "string"}}}}
    content: Document = {}
    if body is not None:
        content[JSON] = {"schema": inlined(body)}
    elif media_type is not None:
        content[media_type] = {"schema": {"type": "string"}}
    if streams:
        content[_EVENTS] = {"schema": {}}  # each API defines its own events
    if content:
        success["content"] = content
    statuses = {*_EVERYWHERE, *failures, *((*_WITH_BODY, *_WITH_MODEL) if has_request_body else ())}
    return {200: success} | {status: _failure(status, has_request_body, error) for status in sorted(statuses)}


def _failure(status: int, has_request_body: bool, error: Schema) -> Document:
    if status == HTTPStatus.UNAUTHORIZED and error is ErrorBody:
        schema: Document = _UNAUTHORIZED
    elif status == HTTPStatus.SERVICE_UNAVAILABLE and not has_request_body:
        schema = inlined(Unhealthy)
    else:
        schema = inlined(error)
    return {"description": _FAILURES[HTTPStatus(status)], "content": {JSON: {"schema": schema}}}


@cache
def inlined(schema: Schema) -> Document:
    """Return a JSON schema without references."""
    (top,), schemas = msgspec.json.schema_components([schema], ref_template=_REF + "{name}")
    found: Document = _inline(top, schemas)
    return found


def _inline(node: Any, schemas: Mapping[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inline(one, schemas) for one in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(schemas[node["$ref"].removeprefix(_REF)], schemas)
    # A discriminator's mapping names components; its values are in the alternatives as well.
    return {key: _inline(value, schemas) for key, value in node.items() if key != "discriminator"}


def share_schemas(document: Document) -> Document:
    """Return a document that has each titled object schema once, under `components`."""
    schemas: Document = {}

    def share(node: Any) -> Any:
        if isinstance(node, list):
            return [share(one) for one in node]
        if not isinstance(node, dict):
            return node
        shared = {key: share(value) for key, value in node.items()}
        if not isinstance(node.get("title"), str) or "properties" not in node:
            return shared
        schemas[node["title"]] = shared
        return {"$ref": _REF + node["title"]}

    paths = share(document["paths"])
    components = document.get("components", {})
    schemas = {**components.get("schemas", {}), **schemas}
    components = {**components, "schemas": schemas, "securitySchemes": SECURITY_SCHEMES}
    return {**document, **SECURITY, "paths": paths, "components": components}


def form_body(fields: Mapping[str, Any], required: Sequence[str]) -> Document:
    """Return the description of a form that has a file.

    Args:
        fields: schemas of the other fields by name.
        required: names of the required fields.
    """
    schema = {
        "type": "object",
        "properties": {"file": {"type": "string", "format": "binary"}, **fields},
        "required": ["file", *required],
    }
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
