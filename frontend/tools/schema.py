"""Builds the JSON schemas and structural tags of calls, from which grammars are compiled."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.frontend.generation.closed_schema import closed_schema
from octavo.frontend.tools.parser import AnswerFrame, CallForm, FunctionTool, ToolParser
from octavo.frontend.tools.subschema import moved_schema, object_schema
from octavo.frontend.tools.tag_formats import any_of, json_of, sequence, structural, tag
from octavo.protocol.structured import StructuredOutputsParams, parse_json

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
"""Schema of a function without parameters."""


def form_schema(form: StructuredOutputsParams) -> dict[str, Any] | None:
    """Return the JSON schema of a constraint; `None` if it has no schema."""
    if form.json_object:
        return {"type": "object"}
    if form.json is None:
        return None
    return dict(parse_json(form.json) if isinstance(form.json, str) else form.json)


def with_tag(
    form: StructuredOutputsParams, answer_tag: dict[str, Any], schemas: Mapping[str, dict[str, Any]]
) -> StructuredOutputsParams:
    """Return a constraint as a structural tag whose errors name the caller's field.

    Args:
        form: the caller's constraint.
        answer_tag: the tag: the same constraint, and the other answers that are allowed.
        schemas: additional schemas in the tag, by the names of their fields.
    """
    name, schema = form.name(form.kinds[0]), form_schema(form)
    own = {} if schema is None else {name: schema}
    return msgspec.structs.replace(
        form,
        json=None,
        json_object=None,
        regex=None,
        choice=None,
        structural_tag=answer_tag,
        param=name,
        schemas={**own, **schemas} or None,
    )


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
    """Return the structural tag of an answer that may call the tools. Strict tools follow their schemas.

    Args:
        tools: the request's tools.
        parser: defines the format of calls.
        answer_schema: the schema of an answer without calls; None: free text, which may contain calls.
        max_calls: maximum number of calls per answer.

    Returns:
        `None` if no grammar can constrain the parser's calls.
    """
    forms = _call_forms([(tool, tool.parameters if tool.is_strict else {"type": "object"}) for tool in tools], parser)
    if forms is None:
        return None
    if answer_schema is None and parser.frame is None:
        tags = [_short_tag(form.tag, mark) for form in forms for mark in form.marks]
        calls = _calls(forms, max_calls)
        tags += [tag(section.begin, calls, section.end) for section in parser.sections]
        marks = [mark for form in forms for mark in form.marks] + [section.mark for section in parser.sections]
        return structural({"type": "triggered_tags", "triggers": list(dict.fromkeys(marks)), "tags": tags})
    other = _other_answer(answer_schema, parser.frame)
    return structural(any_of([other, _calls_alone(forms, parser, max_calls, beside_json=True)]))


def forced_tag(tools: Sequence[FunctionTool], parser: ToolParser, max_calls: int | None) -> dict[str, Any] | None:
    """Return the structural tag of an answer that consists of calls, all of which follow their schemas.

    Args:
        tools: the tools that may be called.
        parser: defines the format of calls.
        max_calls: maximum number of calls per answer.

    Returns:
        `None` if no grammar can constrain the parser's calls.
    """
    forms = _call_forms([(tool, closed_schema(tool.parameters)) for tool in tools], parser)
    return None if forms is None else structural(_calls_alone(forms, parser, max_calls))


def _call_forms(tools: Sequence[tuple[FunctionTool, Mapping[str, Any]]], parser: ToolParser) -> list[CallForm] | None:
    """Return the forms of calls whose arguments have these schemas; `None` if a function has no form."""
    forms = [parser.call_form(tool.name, schema) for tool, schema in tools]
    return None if None in forms else [form for form in forms if form is not None]


def _short_tag(form: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """Return the tag without the text before a mark, because models may begin a call with that mark."""
    begin = form["begin"]
    return {**form, "begin": begin[begin.index(mark) :]}


def _calls(forms: Sequence[CallForm], max_calls: int | None, *, beside_json: bool = False) -> dict[str, Any]:
    return {
        "type": "tags_with_separator",
        "tags": [(form.alone if beside_json else None) or form.tag for form in forms],
        "separator": forms[0].separator,
        "at_least_one": True,
        "stop_after_first": max_calls == 1,
    }


def _calls_alone(
    forms: Sequence[CallForm], parser: ToolParser, max_calls: int | None, *, beside_json: bool = False
) -> dict[str, Any]:
    """Return the format of an answer that consists only of calls."""
    calls = _calls(forms, max_calls, beside_json=beside_json)
    if parser.frame is not None:
        return sequence(parser.frame.begin, calls, parser.frame.end)
    if parser.sections:
        section = parser.sections[0]
        return tag(section.begin, calls, section.end)
    return calls


def _other_answer(schema: Mapping[str, Any] | None, frame: AnswerFrame | None) -> dict[str, Any]:
    """Return the format of an answer without calls: JSON by a schema, or text that does not start like a call."""
    if schema is not None:
        return json_of(schema)
    assert frame is not None, "needed only if calls cannot appear within text"
    return {"type": "regex", "pattern": frame.other_text}


def _call_schema(name: str, key: str) -> dict[str, Any]:
    return object_schema({"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{key}"}})
