"""The grammar of arguments that are written one by one as key, mark and value: `a=1, b="x"`."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from octavo.frontend.tools.subschema import property_schema
from octavo.frontend.tools.tag_formats import elements_of, fixed, json_of, sequence

KEY = re.compile(r"[^\W\d]\w*")
_ANY_KEY = "[A-Za-z_][A-Za-z_0-9]*"

ANY_JSON: Mapping[str, Any] = json_of({})

_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions"})
"""Schema keywords that may occur if the arguments are constrained one by one."""
REMARKS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"})
"""Annotations, which do not constrain anything."""


def keyed_arguments(
    schema: Mapping[str, Any],
    key_end: str,
    separator: str,
    value: Callable[[Any], Mapping[str, Any] | None] = json_of,
    any_value: Mapping[str, Any] = ANY_JSON,
) -> Mapping[str, Any] | None:
    """Return the format of the arguments, required ones first.

    Args:
        schema: the schema of all arguments.
        key_end: the mark between a key and its value.
        separator: the text between two arguments.
        value: returns the format of a value for its schema; None if there is none.
        any_value: the format of a value without a schema.

    Returns:
        `None` if the schema constrains more than each argument by itself, or if a key is not an identifier.
    """
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return None
    if schema.keys() - _KEYWORDS - REMARKS or not all(isinstance(key, str) and key in properties for key in required):
        return None
    if not properties:
        return _further_arguments(schema.get("additionalProperties", True), key_end, separator, any_value)
    if not all(isinstance(key, str) and KEY.fullmatch(key) for key in properties):
        return None
    if not all(inner is True or isinstance(inner, Mapping) for inner in properties.values()):
        return None
    keys = sorted(properties, key=lambda key: key not in required)
    elements = []
    for key in keys:
        inner = value(property_schema(schema, key))
        if inner is None:
            return None
        elements.append(sequence(fixed(f"{key}{key_end}"), inner))
    return elements_of(elements, len(set(required)), separator)


def _further_arguments(
    schema: Any, key_end: str, separator: str, any_value: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """Return the format of arguments with arbitrary names."""
    if schema is False:
        return fixed("")
    if schema is not True and schema != {}:
        return None
    argument = sequence({"type": "regex", "pattern": _ANY_KEY + re.escape(key_end)}, any_value)
    return {"type": "tags_with_separator", "tags": [argument], "separator": separator}
