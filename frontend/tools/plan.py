"""What `tools` and `tool_choice` mean for one request: what the prompt shows, what binds the answer, who reads it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from octavo.frontend.tools.forced import NamedParser, RequiredParser
from octavo.frontend.tools.parser import FunctionTool, ToolParser
from octavo.frontend.tools.schema import calls_schema, structural_tag
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.structured import StructuredOutputsParams

Choice: TypeAlias = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How one request gets its calls."""

    parser: ToolParser | None = None
    """Reads the answer; None: it is content, whatever it says."""
    form: StructuredOutputsParams | None = None
    """What binds the answer."""
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
) -> ToolPlan:
    """Decide what a request's tools ask for.

    Args:
        tools: of the request.
        choice: `tool_choice`, when it names no function.
        named: the function it names.
        is_parallel: there may be several calls.
        auto_parser: reads calls that the model makes of its own accord; None: it may make none.

    Raises:
        InvalidRequestError: `tools` and `tool_choice` do not fit together, or not this server.
    """
    if not tools:
        if named is not None or choice == "required":
            raise InvalidRequestError("tool_choice needs tools to choose from", "tool_choice")
        return ToolPlan()
    if named is not None:
        return _named(tools, named)
    max_calls = None if is_parallel else 1
    if choice == "required":
        form = StructuredOutputsParams(
            json=calls_schema(tools, max_calls), disable_additional_properties=True, param="tools"
        )
        return ToolPlan(RequiredParser(tools), form, max_calls)
    if choice == "none":
        return ToolPlan()
    if auto_parser is None:
        raise InvalidRequestError(
            "this server lets no model choose whether to call tools: start it with --enable-auto-tool-choice and "
            '--tool-call-parser, or set tool_choice to "required", "none" or a function',
            "tool_choice",
        )
    parser = auto_parser(tools)
    return ToolPlan(parser, _strict_form(tools, parser), max_calls)


def _named(tools: Sequence[FunctionTool], name: str) -> ToolPlan:
    for place, tool in enumerate(tools):
        if tool.name == name:
            form = StructuredOutputsParams(
                json=dict(tool.parameters),
                disable_additional_properties=True,
                param=f"tools[{place}].function.parameters",
            )
            return ToolPlan(NamedParser([tool]), form, 1, is_named=True)
    raise InvalidRequestError(f"tool_choice names {name!r}, which is none of the tools", "tool_choice")


def _strict_form(tools: Sequence[FunctionTool], parser: ToolParser) -> StructuredOutputsParams | None:
    try:
        tag = structural_tag(tools, parser)
    except NotImplementedError:
        place = next(place for place, tool in enumerate(tools) if tool.is_strict)
        raise InvalidRequestError(
            "this server's tool parser reads calls that are no JSON, which strict cannot bind under tool_choice auto: "
            'leave strict out, or set tool_choice to "required" or a function',
            f"tools[{place}].function.strict",
        ) from None
    return None if tag is None else StructuredOutputsParams(structural_tag=tag, param="tools")
