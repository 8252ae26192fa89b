"""The page at `/docs`: the API description as plain HTML, without scripts or other hosts."""

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

import msgspec

_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>octavo: the API</title>
<style>
:root { color-scheme: light dark; }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
summary { cursor: pointer; padding: .3rem 0; }
code { font-family: ui-monospace, monospace; font-size: .9em; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1rem; }
td, th { text-align: left; vertical-align: top; padding: .2rem .6rem .2rem 0; border-bottom: 1px solid #8884; }
.method { display: inline-block; min-width: 3.5rem; font-weight: 600; }
</style>
</head>
<body>
"""


def render_page(document: Mapping[str, Any]) -> str:
    """Return the HTML page.

    Args:
        document: the OpenAPI document, with msgspec's schemas.
    """
    info = document["info"]
    parts = [
        _HEAD,
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f"<p>{escape(info['description'])}</p>",
    ]
    parts.append('<p>Machine-readable: <a href="openapi.json">openapi.json</a></p><h2>Routes</h2>')
    for path, operations in document["paths"].items():
        parts += [_operation(method.upper(), path, operation) for method, operation in operations.items()]
    parts.append("<h2>Schemas</h2>")
    parts += [_schema(name, schema) for name, schema in document["components"]["schemas"].items()]
    return "\n".join([*parts, "</body>", "</html>", ""])


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    title = f'<span class="method">{method}</span> <code>{escape(path)}</code> {escape(operation["summary"])}'
    rows = []
    if body := operation.get("requestBody"):
        rows.append(("body", _contents(body)))
    for status, response in operation["responses"].items():
        rows.append((status, " ".join(filter(None, (escape(response["description"]) + ".", _contents(response))))))
    return f"<details><summary>{title}</summary>{_table(('', ''), rows)}</details>"


def _contents(described: Mapping[str, Any]) -> str:
    kinds = described.get("content", {}).items()
    return ", ".join(f"<code>{escape(media_type)}</code> {_type(kind['schema'])}" for media_type, kind in kinds)


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        (f"<code>{escape(field)}</code>{' *' if field in required else ''}", _type(kind), _default(kind))
        for field, kind in sorted(schema.get("properties", {}).items(), key=lambda field: field[0] not in required)
    ]
    inner = _table(("field", "type", "default"), rows) if rows else f"<p>{_type(schema)}</p>"
    text = escape(schema.get("description", ""))
    title = f'<summary id="{escape(name)}"><code>{escape(name)}</code> {text}</summary>'
    return f"<details open>{title}{inner}</details>"


def _type(schema: Mapping[str, Any]) -> str:
    """Return a schema's type as text."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(part) for part in schema["anyOf"]) + _bounds(schema)
    if "enum" in schema or "const" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return ", ".join(f"<code>{_json(value)}</code>" for value in values)
    kind = schema.get("type", "anything")
    if kind == "array" and "items" in schema:
        return f"list of {_type(schema['items'])}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    return escape(str(kind)) + _bounds(schema)


def _bounds(schema: Mapping[str, Any]) -> str:
    return "".join(f" {words} {_json(schema[key])}" for key, words in _BOUNDS.items() if key in schema)


_BOUNDS = {
    "minimum": "from",
    "exclusiveMinimum": "above",
    "maximum": "up to",
    "minLength": "of length from",
    "maxLength": "of length up to",
}


def _default(schema: Mapping[str, Any]) -> str:
    return f"<code>{_json(schema['default'])}</code>" if "default" in schema else ""


def _json(value: Any) -> str:
    return escape(msgspec.json.encode(value).decode())


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{title}</th>" for title in titles) if any(titles) else ""
    lines = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{''.join(lines)}</table>"
