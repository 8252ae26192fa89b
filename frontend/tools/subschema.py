"""JSON schemas that become part of another: what they refer to, and the objects around them."""

from collections.abc import Mapping
from typing import Any


def moved_schema(schema: Any, key: str) -> Any:
    """Return a copy of a schema whose references to itself lead to where it now stands, `#/$defs/KEY`."""
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


def object_schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with exactly these members."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }
