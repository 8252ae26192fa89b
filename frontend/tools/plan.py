"""What `tools` and `tool_choice` mean for one request: what the prompt shows, what binds the answer, who reads it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from octavo.frontend.tools.forced import NamedParser, RequiredParser
from octavo.frontend.tools.parser import FunctionTool, ToolParser
from octavo.frontend.tools.schema import calls_schema, structural_tag
from octavo.frontend.tools.subschema import is_closable
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.structured import StructuredOutputsParams, parse_json

SPACE = " ?"
"""Between the tokens of a forced call's JSON."""

Choice: TypeAlias = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How one request gets its calls."""

    parser: ToolParser | None = None
    """Reads the answer; None: it is content, whatever it says."""
    form: StructuredOutputsParams | None = None
    """What binds the answer."""
    begins_free: bool = False
    """The form lets any text come first, also reasoning."""
    max_calls: int | None = None
    is_named: bool = False
    """The caller has chosen the function: making the call is no reason to finish of its own."""


def plan_tools(
    tools: Sequence[FunctionTool],
    choice: Choice,
    named: str | None,
    *,
    is_parallel: bool,
    auto_parser: type[ToolParser] | None,
    answer_form: StructuredOutputsParams | None = None,
) -> ToolPlan:
    """Decide what a request's tools ask for.

    Args:
        tools: of the request.
        choice: `tool_choice`, when it names no function.
        named: the function it names.
        is_parallel: there may be several calls.
        auto_parser: reads calls that the model makes of its own accord; None: it may make none.
        answer_form: what an answer that does not call must look like; None: anything will do.

    Raises:
        InvalidRequestError: `tools` and `tool_choice` do not fit together, or not this server.
    """
    if not tools:
        if named is not None or choice == "required":
            raise InvalidRequestError("tool_choice needs tools to choose from", "tool_choice")
        return ToolPlan(form=answer_form)
    if answer_form is not None and (named is not None or choice == "required"):
        name = answer_form.name()
        raise InvalidRequestError(
            f"tool_choice leaves no answer but calls, so {name.partition('.')[0]} has nothing to say: leave it out",
            name,
        )
    if named is not None:
        return _named(tools, named)
    max_calls = None if is_parallel else 1
    if choice == "required":
        form = _forced(calls_schema(tools, max_calls), "tools")
        return ToolPlan(RequiredParser(tools), form, max_calls=max_calls)
    if choice == "none":
        return ToolPlan(form=answer_form)
    if auto_parser is None:
        raise InvalidRequestError(
            "this server lets no model choose whether to call tools: start it with --enable-auto-tool-choice and "
            '--tool-call-parser, or set tool_choice to "required", "none" or a function',
            "tool_choice",
        )
    parser = auto_parser(tools)
    auto_form = _auto_form(tools, parser, answer_form, max_calls)
    return ToolPlan(parser, auto_form, begins_free=answer_form is None, max_calls=max_calls)


def _named(tools: Sequence[FunctionTool], name: str) -> ToolPlan:
    for place, tool in enumerate(tools):
        if tool.name == name:
            form = _forced(dict(tool.parameters), f"tools[{place}].function.parameters")
            return ToolPlan(NamedParser([tool]), form, max_calls=1, is_named=True)
    raise InvalidRequestError(f"tool_choice names {name!r}, which is none of the tools", "tool_choice")


def _forced(schema: dict[str, Any], param: str) -> StructuredOutputsParams:
    """Return the form of calls that are written because they must be.

    They have none of the white space that weak models get lost in, and no arguments that the schema does not name.
    """
    return StructuredOutputsParams(
        json=schema, disable_additional_properties=is_closable(schema), whitespace_pattern=SPACE, param=param
    )


def _auto_form(
    tools: Sequence[FunctionTool],
    parser: ToolParser,
    answer_form: StructuredOutputsParams | None,
    max_calls: int | None,
) -> StructuredOutputsParams | None:
    """Return what binds an answer that may call, or say what the caller wants; None when nothing does."""
    strict = next((f"tools[{place}].function.strict" for place, tool in enumerate(tools) if tool.is_strict), None)
    if strict is None and answer_form is None:
        return None
    schema = None if answer_form is None else _schema_of(answer_form)
    tag = structural_tag(tools, parser, schema, max_calls)
    if tag is None:
        name = strict or "tools"
        raise InvalidRequestError(
            f"under tool_choice auto no grammar can bind calls as this server's model writes them: leave out "
            f'{"strict" if strict else "the form of the answer"}, or set tool_choice to "required" or a function',
            name,
        )
    if answer_form is None:
        return StructuredOutputsParams(structural_tag=tag, param="tools")
    name = answer_form.name(answer_form.kinds[0])
    return msgspec.structs.replace(answer_form, json=None, json_object=None, structural_tag=tag, param=name)


def _schema_of(form: StructuredOutputsParams) -> dict[str, Any]:
    if form.json_object:
        return {"type": "object"}
    if form.json is None:
        raise InvalidRequestError(
            "beside tools the answer may have no form but that of a JSON schema: leave the tools out, or set "
            'tool_choice to "none"',
            form.name(form.kinds[0]),
        )
    schema = parse_json(form.json) if isinstance(form.json, str) else form.json
    return dict(schema)
