"""Values written as bare text, and the JSON that they mean by the schema of their parameter."""

import ast
import json
from collections.abc import Mapping
from typing import Any, NoReturn

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer"}


def is_text(schema: object) -> bool:
    """True when a parameter of this schema can be nothing but a text: also one of which nothing is said."""
    kinds = _kinds(schema)
    return not kinds or kinds == {"string"}


def is_free_text(schema: object) -> bool:
    """True when a parameter that is a text may be any text, or one of a list."""
    return not isinstance(schema, Mapping) or not schema.keys() & {"pattern", "minLength", "maxLength", "format", "not"}


def json_string(text: str) -> str:
    """Return the text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def json_value(text: str, schema: object) -> str:
    """Return the JSON of a whole value: of the kind that the schema says, and a string when it cannot be that."""
    if is_text(schema):
        return json_string(text)
    bare = text.strip()
    bare = _PYTHON_WORDS.get(bare, bare)
    kinds = _kinds(schema)
    for read in (_from_json, _from_python):
        try:
            value = read(bare)
            if kinds & _kinds_of(value):
                return _whole_characters(json.dumps(value, ensure_ascii=False, allow_nan=False))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return json_string(text)


def _whole_characters(text: str) -> str:
    """Replace each half of a surrogate pair, which an escape can make but no answer can carry, by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _from_json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse, strict=False)


def _from_python(text: str) -> Any:
    """Read a Python literal: models write `{'a': True}` too."""
    return ast.literal_eval(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _kinds(schema: object) -> set[str]:
    """Return the JSON types that a schema allows, as far as it says so; none: it does not."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    kinds = {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
    for choice in ("anyOf", "oneOf", "allOf"):
        members = schema.get(choice)
        for member in members if isinstance(members, list) else []:
            kinds |= _kinds(member)
    if not kinds:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        for value in values if isinstance(values, list) else []:
            kinds |= _kinds_of(value)
        if "$ref" in schema or "properties" in schema:
            kinds.add("object")
    return kinds


def _kinds_of(value: object) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    kind = _KINDS.get(type(value), "")
    return {kind, "number"} if kind == "integer" else {kind}
