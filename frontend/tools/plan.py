"""Turns `tools` and `tool_choice` of a request into a grammar for the answer and a parser for it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from octavo.frontend.tools.forced import NamedParser, NativeParser, RequiredParser
from octavo.frontend.tools.parser import FunctionTool, ToolParser
from octavo.frontend.tools.schema import calls_schema, forced_tag, form_schema, structural_tag, with_tag
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.structured import StructuredOutputsParams

SPACE = " ?"
"""White space that the JSON of a forced call may have between tokens."""

Mode: TypeAlias = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """A request's `tool_choice`."""

    mode: Mode = "auto"
    """The mode; ignored if a function is named."""
    named: str | None = None
    """The function that must be called."""
    allowed: frozenset[str] | None = None
    """The functions that may be called; `None` if all may."""

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.named is not None or self.mode == "required"


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How tool calls are generated and parsed for one request."""

    parser: ToolParser | None = None
    """Parses the answer; `None` if the complete answer is content."""
    form: StructuredOutputsParams | None = None
    """The constraint on the answer; `None` if it is unconstrained."""
    begins_free: bool = False
    """Whether the form allows free text first, including reasoning."""
    max_calls: int | None = None
    is_named: bool = False
    """Whether the client has named the function; if so, the finish reason is not `tool_calls`."""
    has_model_calls: bool = False
    """Whether the model may call in its own format, where and when it chooses."""


def plan_tools(
    tools: Sequence[FunctionTool],
    choice: ToolChoice,
    *,
    is_parallel: bool,
    auto_parser: type[ToolParser] | None,
    answer_form: StructuredOutputsParams | None = None,
) -> ToolPlan:
    """Return the plan for a request's tools.

    Args:
        tools: the request's tools.
        choice: the request's `tool_choice`.
        is_parallel: whether an answer may contain several calls.
        auto_parser: the parser of the model's call format, which forced calls use too; None: auto is not enabled.
        answer_form: the constraint on an answer without calls; None: unconstrained.

    Raises:
        InvalidRequestError: `tools` and `tool_choice` are inconsistent or not supported by this server.
    """
    if not tools:
        if choice.is_forced or choice.allowed is not None:
            raise InvalidRequestError("tool_choice needs tools to choose from", "tool_choice")
        return ToolPlan(form=answer_form)
    if answer_form is not None and choice.is_forced:
        name = answer_form.name()
        raise InvalidRequestError(
            f"tool_choice requires a tool call, so {name.partition('.')[0]} has no effect: leave it out",
            name,
        )
    if choice.named is not None:
        return _named(tools, choice.named, auto_parser)
    num_tools, tools = len(tools), _allowed(tools, choice.allowed)
    max_calls = None if is_parallel else 1
    if choice.mode == "required":
        if native := _native(tools, auto_parser, max_calls):
            return native
        form = forced_form(tools, json=calls_schema(tools, max_calls))
        return ToolPlan(RequiredParser(tools), form, max_calls=max_calls)
    if choice.mode == "none":
        return ToolPlan(form=answer_form)
    if auto_parser is None:
        raise InvalidRequestError(
            "tool_choice auto is not enabled on this server: start it with --enable-auto-tool-choice and "
            '--tool-call-parser, or set tool_choice to "required", "none" or a function',
            "tool_choice",
        )
    parser = auto_parser(tools)
    if answer_form is not None and form_schema(answer_form) is None:
        # A grammar can combine only a JSON schema with calls. Other constraints apply to the complete answer.
        return ToolPlan(parser, answer_form, max_calls=max_calls, has_model_calls=True)
    auto_form = _auto_form(tools, parser, answer_form, max_calls, is_closed=len(tools) < num_tools)
    begins_free = answer_form is None and parser.frame is None
    return ToolPlan(parser, auto_form, begins_free=begins_free, max_calls=max_calls, has_model_calls=True)


def _allowed(tools: Sequence[FunctionTool], names: frozenset[str] | None) -> Sequence[FunctionTool]:
    """Return the tools that may be called."""
    if names is None:
        return tools
    if unknown := names - {tool.name for tool in tools}:
        raise InvalidRequestError(f"tool_choice allows {min(unknown)!r}, which is not one of the tools", "tool_choice")
    return [tool for tool in tools if tool.name in names]


def _named(tools: Sequence[FunctionTool], name: str, auto_parser: type[ToolParser] | None) -> ToolPlan:
    for tool in tools:
        if tool.name == name:
            if native := _native([tool], auto_parser, 1):
                return replace(native, is_named=True)
            form = forced_form([tool], json=dict(tool.parameters))
            return ToolPlan(NamedParser([tool]), form, max_calls=1, is_named=True)
    raise InvalidRequestError(f"tool_choice names {name!r}, which is not one of the tools", "tool_choice")


def _native(
    tools: Sequence[FunctionTool], auto_parser: type[ToolParser] | None, max_calls: int | None
) -> ToolPlan | None:
    """Return the plan for calls that are forced in the model's own format, which the model writes best.

    `None` if the server does not know the format, or the format cannot express a schema.
    """
    parser = None if auto_parser is None else auto_parser(tools)
    tag = None if parser is None else forced_tag(tools, parser, max_calls)
    if parser is None or tag is None:
        return None
    form = forced_form(tools, structural_tag=tag)
    return ToolPlan(NativeParser(parser), form, max_calls=max_calls)


def _schema_name(tool: FunctionTool) -> str:
    return f"{tool.param}.parameters"


def _schemas(tools: Sequence[FunctionTool]) -> dict[str, dict[str, Any]]:
    """Return the schemas of functions, by the request fields that contain them."""
    return {_schema_name(tool): dict(tool.parameters) for tool in tools}


def calls_form(
    strict: Sequence[FunctionTool], tag: dict[str, Any], answer_form: StructuredOutputsParams | None
) -> StructuredOutputsParams:
    """Return the constraint on an answer that may contain calls.

    Args:
        strict: the functions whose schemas are in the tag.
        tag: the structural tag, which describes all answers.
        answer_form: the constraint on an answer without calls, which the tag includes; None: unconstrained.
    """
    schemas = _schemas(strict)
    if answer_form is None:
        return StructuredOutputsParams(structural_tag=tag, param="tools", schemas=schemas)
    return with_tag(answer_form, tag, schemas)


def forced_form(
    tools: Sequence[FunctionTool],
    *,
    json: dict[str, Any] | None = None,
    structural_tag: dict[str, Any] | None = None,
) -> StructuredOutputsParams:
    """Return the constraint that forces calls of these tools, as a schema or as a tag.

    It limits white space, which weak models may repeat endlessly, and excludes arguments that the schema does not name.
    """
    return StructuredOutputsParams(
        json=json,
        structural_tag=structural_tag,
        disable_additional_properties=True,
        whitespace_pattern=SPACE,
        param=_schema_name(tools[0]) if len(tools) == 1 else "tools",
        schemas=_schemas(tools),
    )


def _auto_form(
    tools: Sequence[FunctionTool],
    parser: ToolParser,
    answer_form: StructuredOutputsParams | None,
    max_calls: int | None,
    *,
    is_closed: bool,
) -> StructuredOutputsParams | None:
    """Return the constraint on an answer that may contain calls; `None` if it is unconstrained.

    Args:
        tools: the tools that may be called.
        parser: defines the format of calls.
        answer_form: the constraint on an answer without calls, which is a JSON schema.
        max_calls: maximum number of calls per answer.
        is_closed: whether the prompt lists other tools that must not be called.
    """
    strict = next((f"{tool.param}.strict" for tool in tools if tool.is_strict), None)
    if strict is None and answer_form is None and not is_closed:
        return None
    schema = None if answer_form is None else form_schema(answer_form)
    tag = structural_tag(tools, parser, schema, max_calls)
    if tag is None and strict is None and not is_closed:
        return answer_form  # it constrains the complete answer
    if tag is None:
        name, cause = (strict, "strict") if strict else ("tool_choice", "allowed_tools")
        raise InvalidRequestError(
            f"with tool_choice auto, no grammar can constrain calls in this model's format: leave out {cause}, "
            'or set tool_choice to "required" or a function',
            name,
        )
    return calls_form([tool for tool in tools if tool.is_strict], tag, answer_form)
