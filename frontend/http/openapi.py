"""The description of the API, and the page that shows it: made from the route table and the schemas."""

import inspect
from collections.abc import Sequence
from typing import Any

import msgspec

from octavo import __version__
from octavo.frontend.http.message import JSON
from octavo.frontend.http.route import Route

DOCUMENT_PATH = "/openapi.json"

_REF = "#/components/schemas/{name}"

PAGE = f"""<!DOCTYPE html>
<html>
<head>
<meta charset="utf-8">
<title>octavo</title>
<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({{url: "{DOCUMENT_PATH}", dom_id: "#swagger-ui", deepLinking: true}})</script>
</body>
</html>
"""
"""Shows the document with Swagger UI, which the browser fetches from a public server."""


def describe(routes: Sequence[Route]) -> bytes:
    """Return the OpenAPI document as JSON."""
    bodies = [body for route in routes for body in (route.request, route.response) if body is not None]
    _, schemas = msgspec.json.schema_components(bodies, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.public_path, {})[route.method.lower()] = _operation(route)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "octavo", "version": __version__},
            "paths": paths,
            "components": {"schemas": schemas},
        }
    )


def _operation(route: Route) -> dict[str, Any]:
    success: dict[str, Any] = {"description": "Success"}
    described: dict[str, Any] = {
        "summary": (inspect.getdoc(route.handler) or "").split("\n")[0],
        "operationId": f"{route.method} {route.path}",
        "responses": {"200": success},
    }
    if route.variables:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in route.variables
        ]
    if route.request is not None:
        described["requestBody"] = {"required": True, "content": _content(route.request)}
    if route.response is not None:
        success["content"] = _content(route.response)
    return described


def _content(body: type[msgspec.Struct]) -> dict[str, Any]:
    return {JSON: {"schema": {"$ref": _REF.format(name=body.__name__)}}}
