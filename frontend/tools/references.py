"""References within JSON schemas, for schemas that become part of another."""

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
