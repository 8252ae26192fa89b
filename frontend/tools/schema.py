"""JSON schemas and structural tags of calls, from which grammars are built."""

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.frontend.tools.parser import AnswerFrame, FunctionTool, ToolParser
from octavo.frontend.tools.subschema import moved_schema, object_schema

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
"""Schema of a function without parameters."""


def calls_schema(tools: Sequence[FunctionTool], max_calls: int | None) -> dict[str, Any]:
    """Return the schema of one or more calls of any of the tools: an array of `{"name", "parameters"}`."""
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [_call_schema(tool.name, f"tool{number}") for number, tool in enumerate(tools)]},
        "$defs": {f"tool{number}": moved_schema(tool.parameters, f"tool{number}") for number, tool in enumerate(tools)},
    }
    if max_calls is not None:
        schema["maxItems"] = max_calls
    return schema


def structural_tag(
    tools: Sequence[FunctionTool], parser: ToolParser, answer_schema: Mapping[str, Any] | None, max_calls: int | None
) -> dict[str, Any] | None:
    """Return the structural tag of an answer that may call the tools; strict tools follow their schemas.

    Args:
        tools: the request's tools.
        parser: defines the format of calls.
        answer_schema: the schema of an answer without calls; None: free text, which may contain calls.
        max_calls: limit per answer.

    Returns:
        None if no grammar can constrain the parser's calls.
    """
    tags, alone, triggers, separator = [], [], [], ""
    for tool in tools:
        form = parser.call_form(tool.name, tool.parameters if tool.is_strict else {"type": "object"})
        if form is None:
            return None
        tags.append(form.tag)
        alone.append(form.alone or form.tag)
        separator = form.separator
        if form.trigger not in triggers:
            triggers.append(form.trigger)
    if answer_schema is None and parser.frame is None:
        return _tag_of({"type": "triggered_tags", "triggers": triggers, "tags": tags})
    calls = {"type": "tags_with_separator", "tags": alone, "separator": separator, "at_least_one": True}
    calls["stop_after_first"] = max_calls == 1
    if parser.frame is not None:
        calls = {"type": "sequence", "elements": [parser.frame.begin, calls, parser.frame.end]}
    return _tag_of({"type": "or", "elements": [_other_answer(answer_schema, parser.frame), calls]})


def _other_answer(schema: Mapping[str, Any] | None, frame: AnswerFrame | None) -> dict[str, Any]:
    """Return the format of an answer without calls: JSON by a schema, or text that does not start like calls."""
    if schema is not None:
        return {"type": "json_schema", "json_schema": schema}
    assert frame is not None, "needed only if calls cannot appear within text"
    return {"type": "regex", "pattern": frame.other_text}


def _tag_of(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


def _call_schema(name: str, key: str) -> dict[str, Any]:
    return object_schema({"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{key}"}})
