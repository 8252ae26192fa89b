"""Building blocks of structural tags (docs/structured-output.md), from which the forms of calls are composed."""

from collections.abc import Iterable, Mapping
from typing import Any

ANY_TEXT: Mapping[str, Any] = {"type": "any_text"}
NUMBER: Mapping[str, Any] = {"type": "regex", "pattern": "0|[1-9][0-9]{0,2}"}
"""The number of a call, which some formats write."""


def fixed(text: str) -> dict[str, Any]:
    """Return the format of a fixed text."""
    return {"type": "const_string", "value": text}


def json_of(schema: object) -> dict[str, Any]:
    """Return the format of JSON that matches a schema."""
    return {"type": "json_schema", "json_schema": schema}


def structural(form: Mapping[str, Any]) -> dict[str, Any]:
    """Return the structural tag of an answer with this format."""
    return {"type": "structural_tag", "format": form}


def sequence(*elements: Mapping[str, Any]) -> dict[str, Any]:
    """Return the format of several parts in order."""
    return {"type": "sequence", "elements": list(elements)}


def any_of(elements: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the format of one of several alternatives."""
    return {"type": "or", "elements": list(elements)}


def tag(begin: str, content: Mapping[str, Any], end: str) -> dict[str, Any]:
    """Return the format of content between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def elements_of(elements: Iterable[Mapping[str, Any]], num_required: int, separator: str) -> dict[str, Any]:
    """Return the format of the required first elements, then any of the others, each at most once and in order."""
    return {
        "type": "elements_with_separator",
        "elements": list(elements),
        "num_required": num_required,
        "separator": separator,
    }
