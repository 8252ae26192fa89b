"""What `tools` and `tool_choice` mean for one request: what the prompt shows, what binds the answer, who reads it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from octavo.frontend.tools.forced import NamedParser, RequiredParser
from octavo.frontend.tools.parser import FunctionTool, ToolParser
from octavo.frontend.tools.schema import calls_schema, structural_tag
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.structured import StructuredOutputsParams, parse_json

SPACE = " ?"
"""Between the tokens of a forced call's JSON."""

Mode: TypeAlias = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What a request's `tool_choice` says."""

    mode: Mode = "auto"
    """Without meaning where a function is named."""
    named: str | None = None
    """The function that must be called."""
    allowed: frozenset[str] | None = None
    """The functions that may be called; None: all."""

    @property
    def is_forced(self) -> bool:
        """True when there is no answer but calls."""
        return self.named is not None or self.mode == "required"


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
    choice: ToolChoice,
    *,
    is_parallel: bool,
    auto_parser: type[ToolParser] | None,
    answer_form: StructuredOutputsParams | None = None,
) -> ToolPlan:
    """Decide what a request's tools ask for.

    Args:
        tools: of the request.
        choice: which of them, and whether.
        is_parallel: there may be several calls.
        auto_parser: reads calls that the model makes of its own accord; None: it may make none.
        answer_form: what an answer that does not call must look like; None: anything will do.

    Raises:
        InvalidRequestError: `tools` and `tool_choice` do not fit together, or not this server.
    """
    if not tools:
        if choice.is_forced or choice.allowed is not None:
            raise InvalidRequestError("tool_choice needs tools to choose from", "tool_choice")
        return ToolPlan(form=answer_form)
    if answer_form is not None and choice.is_forced:
        name = answer_form.name()
        raise InvalidRequestError(
            f"tool_choice leaves no answer but calls, so {name.partition('.')[0]} has nothing to say: leave it out",
            name,
        )
    if choice.named is not None:
        return _named(tools, choice.named)
    num_tools, tools = len(tools), _allowed(tools, choice.allowed)
    max_calls = None if is_parallel else 1
    if choice.mode == "required":
        param = _schema_name(tools[0]) if len(tools) == 1 else "tools"
        form = _forced(calls_schema(tools, max_calls), param, _schemas(tools))
        return ToolPlan(RequiredParser(tools), form, max_calls=max_calls)
    if choice.mode == "none":
        return ToolPlan(form=answer_form)
    if auto_parser is None:
        raise InvalidRequestError(
            "this server lets no model choose whether to call tools: start it with --enable-auto-tool-choice and "
            '--tool-call-parser, or set tool_choice to "required", "none" or a function',
            "tool_choice",
        )
    parser = auto_parser(tools)
    auto_form = _auto_form(tools, parser, answer_form, max_calls, is_closed=len(tools) < num_tools)
    begins_free = answer_form is None and parser.frame is None
    return ToolPlan(parser, auto_form, begins_free=begins_free, max_calls=max_calls)


def _allowed(tools: Sequence[FunctionTool], names: frozenset[str] | None) -> Sequence[FunctionTool]:
    """Return the tools that may be called."""
    if names is None:
        return tools
    if unknown := names - {tool.name for tool in tools}:
        raise InvalidRequestError(f"tool_choice allows {min(unknown)!r}, which is none of the tools", "tool_choice")
    return [tool for tool in tools if tool.name in names]


def _named(tools: Sequence[FunctionTool], name: str) -> ToolPlan:
    for tool in tools:
        if tool.name == name:
            form = _forced(dict(tool.parameters), _schema_name(tool))
            return ToolPlan(NamedParser([tool]), form, max_calls=1, is_named=True)
    raise InvalidRequestError(f"tool_choice names {name!r}, which is none of the tools", "tool_choice")


def _schema_name(tool: FunctionTool) -> str:
    return f"{tool.param}.parameters"


def _schemas(tools: Sequence[FunctionTool]) -> dict[str, dict[str, Any]]:
    """Return the schemas of functions by the caller's names of them."""
    return {_schema_name(tool): dict(tool.parameters) for tool in tools}


def _forced(
    schema: dict[str, Any], param: str, schemas: dict[str, dict[str, Any]] | None = None
) -> StructuredOutputsParams:
    """Return the form of calls that are written because they must be.

    They have none of the white space that weak models get lost in, and no arguments that the schema does not name.
    """
    return StructuredOutputsParams(
        json=schema,
        disable_additional_properties=True,
        whitespace_pattern=SPACE,
        param=param,
        schemas=schemas,
    )


def _auto_form(
    tools: Sequence[FunctionTool],
    parser: ToolParser,
    answer_form: StructuredOutputsParams | None,
    max_calls: int | None,
    *,
    is_closed: bool,
) -> StructuredOutputsParams | None:
    """Return what binds an answer that may call, or say what the caller wants; None when nothing does.

    Args:
        tools: that may be called.
        parser: knows how calls are written.
        answer_form: of an answer that does not call.
        max_calls: of one answer.
        is_closed: the prompt tells of further tools, which may not be called.
    """
    strict = next((f"{tool.param}.strict" for tool in tools if tool.is_strict), None)
    if strict is None and answer_form is None and not is_closed:
        return None
    schema = None if answer_form is None else _schema_of(answer_form)
    tag = structural_tag(tools, parser, schema, max_calls)
    if tag is None:
        name = strict or ("tool_choice" if is_closed else "tools")
        cause = "strict" if strict else "allowed_tools" if is_closed else "the form of the answer"
        raise InvalidRequestError(
            f"under tool_choice auto no grammar can bind calls as this server's model writes them: leave out {cause}, "
            'or set tool_choice to "required" or a function',
            name,
        )
    schemas = _schemas([tool for tool in tools if tool.is_strict])
    if answer_form is None or schema is None:
        return StructuredOutputsParams(structural_tag=tag, param="tools", schemas=schemas)
    name = answer_form.name(answer_form.kinds[0])
    return msgspec.structs.replace(
        answer_form,
        json=None,
        json_object=None,
        structural_tag=tag,
        param=name,
        schemas={name: schema, **schemas},
    )


def _schema_of(form: StructuredOutputsParams) -> dict[str, Any]:
    if form.json_object:
        return {"type": "object"}
    if form.json is None:
        raise InvalidRequestError(
            "beside tools the answer may have no form but that of a JSON schema: leave the tools out, or set "
            'tool_choice to "none"',
            form.name(*form.kinds),
        )
    schema = parse_json(form.json) if isinstance(form.json, str) else form.json
    return dict(schema)
