"""Converts values that models write as bare text to JSON, guided by the parameter's schema."""

import ast
import json
from collections.abc import Mapping
from typing import Any, NoReturn

_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}
"""JSON literals by the models' spellings, in lower case; case is ignored."""
_KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer"}


def is_text(schema: object) -> bool:
    """Return whether a parameter can only be a string. A schema without a type counts as a string."""
    kinds = kinds_of_schema(schema)
    return not kinds or kinds == {"string"}


def is_free_text(schema: object) -> bool:
    """Return whether a string parameter is either unconstrained or constrained only to a list of strings."""
    return not isinstance(schema, Mapping) or not schema.keys() & {"pattern", "minLength", "maxLength", "format", "not"}


def json_string(text: str) -> str:
    """Return the text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def json_value(text: str, schema: object) -> str:
    """Return the JSON of a complete value: of the schema's type, or a string if it cannot be parsed as that type.

    Quotes are part of a string, because these formats write strings without quotes.
    """
    if is_text(schema):
        return json_string(text)
    bare = text.strip()
    bare = _WORDS.get(bare.lower(), bare)
    kinds = kinds_of_schema(schema)
    # int accepts leading zeros, which a string must keep
    for read in (_from_json, _from_python, *(() if "string" in kinds else (int,))):
        try:
            value = read(bare)
            if not isinstance(value, str) and kinds & _kinds_of(value):
                if isinstance(value, float) and "number" not in kinds:
                    value = int(value)
                return _whole_characters(json.dumps(value, ensure_ascii=False, allow_nan=False))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return json_string(text)


def open_value(text: str, schema: object, is_final: bool) -> str | None:
    """Return the JSON of an incomplete value; `None` if no part of it is certain.

    Args:
        text: the value so far.
        schema: the schema of the value. Only strings have certain JSON before their end.
        is_final: whether no more text follows; if so, the complete value is returned.
    """
    if is_text(schema):
        return json_string(text)[:-1]
    return text.strip() if is_final else None


def kinds_of_schema(schema: object) -> set[str]:
    """Return the JSON types that a schema allows; empty if it does not restrict them."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    kinds = {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
    for choice in ("anyOf", "oneOf", "allOf"):
        members = schema.get(choice)
        for member in members if isinstance(members, list) else []:
            kinds |= kinds_of_schema(member)
    if not kinds:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        for value in values if isinstance(values, list) else []:
            kinds |= _kinds_of(value)
        if "$ref" in schema or "properties" in schema:
            kinds.add("object")
    return kinds


def _whole_characters(text: str) -> str:
    """Replace each lone surrogate by U+FFFD: an escape can produce one, but UTF-8 cannot encode it."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _from_json(text: str) -> Any:
    return json.loads(text, parse_constant=_reject, strict=False)


def _from_python(text: str) -> Any:
    """Parse a Python literal, because models also write `{'a': True}`."""
    return ast.literal_eval(text)


def _reject(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _kinds_of(value: object) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    kind = _KINDS.get(type(value), "")
    return {kind, "number"} if kind == "integer" else {kind}
