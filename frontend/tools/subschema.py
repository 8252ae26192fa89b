"""Embeds JSON schemas in other schemas: moves and resolves references."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

MAX_REFERENCES = 8
"""Maximum length of a chain of references, which may be circular."""

MAX_DEPTH = 100
"""Maximum nesting of objects and lists: schemas are processed recursively."""


def is_too_deep(schema: object) -> bool:
    """Return whether a schema is nested more than `MAX_DEPTH` levels deep."""
    level: list[object] = [schema]
    for _ in range(MAX_DEPTH + 1):
        inner: list[object] = []
        for value in level:
            if isinstance(value, Mapping):
                inner += value.values()
            elif isinstance(value, list):
                inner += value
        if not inner:
            return False
        level = inner
    return True


def moved_schema(schema: Any, key: str) -> Any:
    """Return a copy of a schema for use at `#/$defs/KEY`, with its internal references adjusted."""
    if isinstance(schema, Mapping):
        return {
            name: f"#/$defs/{key}{value[1:]}"
            if name == "$ref" and isinstance(value, str) and value.startswith("#")
            else moved_schema(value, key)
            for name, value in schema.items()
        }
    if isinstance(schema, list):
        return [moved_schema(value, key) for value in schema]
    return schema


def property_schema(schema: Mapping[str, Any], name: str) -> Any:
    """Return a self-contained schema of one property of an object, including the definitions it refers to."""
    inner = schema["properties"][name]
    if not _refers(inner):
        return inner
    place = name.replace("~", "~0").replace("/", "~1")
    return {"$defs": {"call": moved_schema(schema, "call")}, "$ref": f"#/$defs/call/properties/{place}"}


def dereferenced(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return a schema with its references, and those of its alternatives, resolved.

    Nested parts are unchanged, as are references that do not resolve within `root`.
    """
    schema = _resolved(schema, root)
    if not isinstance(schema, Mapping):
        return schema
    alternatives = {
        key: [_resolved(member, root) for member in schema[key]]
        for key in ("anyOf", "oneOf", "allOf")
        if isinstance(schema.get(key), list)
    }
    return {**schema, **alternatives}


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        target = _pointer_target(root, reference) if isinstance(reference, str) and reference.startswith("#") else None
        if not isinstance(target, Mapping):
            break
        schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


def _pointer_target(root: Mapping[str, Any], reference: str) -> Any:
    """Return the target of a JSON pointer (RFC 6901); `None` if it does not exist."""
    place: Any = root
    for name in reference.removeprefix("#").split("/")[1:]:
        key = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping):
            place = place.get(key)
        elif isinstance(place, list) and len(key) < 10 and key.isdecimal() and int(key) < len(place):
            place = place[int(key)]
        else:
            return None
    return place


def _refers(schema: Any) -> bool:
    """Return whether a schema contains a reference."""
    if isinstance(schema, Mapping):
        return "$ref" in schema or any(map(_refers, schema.values()))
    return isinstance(schema, list) and any(map(_refers, schema))


def object_schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with exactly these members."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }
