"""Closes JSON Schemas: objects accept only the properties that they name. Does not validate schemas."""

from collections.abc import Mapping
from typing import Any

_NAMING = ("properties", "patternProperties")
"""Keywords that name an object's properties."""

_PARTS = ("allOf", "anyOf", "oneOf")
"""Keywords whose subschemas apply to the same value."""

_SCHEMAS_BY_NAME = (*_NAMING, "$defs", "definitions")
_SCHEMAS = ("items", "prefixItems", "additionalItems", "additionalProperties")


def closed_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects accept only their named properties, unless the schema says otherwise.

    An object stays open if several keywords name its properties, such as allOf or keywords next to a $ref: each may
    name properties that the others do not. The schemas of its properties are closed nevertheless.

    Raises:
        RecursionError: the schema is nested too deeply.
    """
    closer = _Closer()
    while True:
        num_parts = len(closer.parts)
        closed: dict[str, Any] = closer.close(schema, "#", is_part=False)
        if len(closer.parts) == num_parts:
            return closed


class _Closer:
    """Closes a schema recursively, and collects references to partial schemas."""

    def __init__(self) -> None:
        self.parts: set[str] = set()
        """References to schemas that describe only a part of an object and therefore stay open."""

    def close(self, schema: Any, place: str, *, is_part: bool) -> Any:
        """Return a closed schema, or a list of closed schemas.

        Args:
            schema: any value; a value that is not a schema is returned unchanged.
            place: the JSON pointer of the schema.
            is_part: whether another schema names further properties of the same object.
        """
        if isinstance(schema, list):
            return [self.close(one, f"{place}/{index}", is_part=is_part) for index, one in enumerate(schema)]
        if not isinstance(schema, Mapping):
            return schema
        is_part = is_part or place in self.parts
        is_combined = is_part or _is_combined(schema)
        if is_combined and isinstance(schema.get("$ref"), str):
            self.parts.add(schema["$ref"])
        closed = dict(schema)
        for key, value in schema.items():
            if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
                closed[key] = {
                    name: self.close(one, f"{place}/{key}/{_escaped(name)}", is_part=False)
                    for name, one in value.items()
                }
            elif key in _PARTS or key in _SCHEMAS:
                closed[key] = self.close(value, f"{place}/{key}", is_part=is_combined and key in _PARTS)
        if not is_combined and any(isinstance(schema.get(key), Mapping) for key in _NAMING):
            closed.setdefault("additionalProperties", False)
        return closed


def _is_combined(schema: Mapping[str, Any]) -> bool:
    """Return whether more than one keyword names properties of the object."""
    parts = schema.get("allOf")
    num_places = any(key in schema for key in _NAMING) + sum(key in schema for key in (*_PARTS, "$ref"))
    return num_places > 1 or (isinstance(parts, list) and len(parts) > 1)


def _escaped(name: str) -> str:
    """Return a name escaped for a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
