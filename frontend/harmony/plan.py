"""Turns tool choice and answer form of a request into the grammar of an answer in channels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from octavo.frontend.harmony.header import CHANNEL, CONSTRAIN, END, FUNCTIONS, MESSAGE, START
from octavo.frontend.tools.parser import FunctionTool, ToolParser
from octavo.frontend.tools.plan import ToolChoice, ToolPlan, calls_form, forced_form, plan_tools
from octavo.frontend.tools.schema import form_schema, with_tag
from octavo.frontend.tools.tag_formats import ANY_TEXT, any_of, fixed, json_of, sequence, structural, tag
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.structured import StructuredOutputsParams, parse_json

HEAD = f"{START}assistant"
"""Start of every message after the reasoning."""
FINAL = f"{CHANNEL}final{MESSAGE}"
JSON = f" {CONSTRAIN}json{MESSAGE}"

_PREAMBLE = tag(f"{HEAD}{CHANNEL}commentary{MESSAGE}", ANY_TEXT, END)


@dataclass(frozen=True, slots=True)
class HarmonyPlan(ToolPlan):
    """A tool plan for an answer in channels."""

    functions: frozenset[str] = frozenset()
    """Names of the functions that may be called."""


def plan_harmony(
    tools: Sequence[FunctionTool],
    choice: ToolChoice,
    *,
    is_parallel: bool,
    auto_parser: type[ToolParser] | None,
    answer_form: StructuredOutputsParams | None = None,
    is_continued: bool = False,
) -> HarmonyPlan:
    """Return the plan for a request's tools and answer form.

    The form applies to the messages after the reasoning. A call ends the answer, so there is at most one call.

    Args:
        tools: the request's tools.
        choice: the request's `tool_choice`.
        is_parallel: whether an answer may contain several calls.
        auto_parser: the parser; None: `tool_choice` auto is not enabled.
        answer_form: the constraint on an answer without calls; None: unconstrained.
        is_continued: whether the answer continues the text of a message, which is in the final channel.

    Raises:
        InvalidRequestError: `tools` and `tool_choice` are inconsistent or not supported.
    """
    plan = _checked(tools, choice, is_parallel, auto_parser, answer_form)
    if is_continued and choice.is_forced:
        raise InvalidRequestError(
            "continue_final_message continues a text, but tool_choice requires a call: leave one of them out",
            "tool_choice",
        )
    may_call = bool(tools) and (choice.is_forced or choice.mode == "auto")
    called = [tool for tool in tools if _is_allowed(tool, choice)] if may_call else []
    if is_continued:
        form = answer_form
    elif called and (choice.is_forced or answer_form is not None or _constrains_calls(tools, called)):
        form = _form_of_calls(called, answer_form, is_forced=choice.is_forced)
    else:
        form = None if answer_form is None else _form_of_answer(answer_form)
    functions = frozenset(tool.name for tool in called)
    return HarmonyPlan(form=form, max_calls=plan.max_calls, is_named=plan.is_named, functions=functions)


def _checked(
    tools: Sequence[FunctionTool],
    choice: ToolChoice,
    is_parallel: bool,
    auto_parser: type[ToolParser] | None,
    answer_form: StructuredOutputsParams | None,
) -> ToolPlan:
    """Check a request like for every other format. Return that plan, whose form does not use channels."""
    plan_tools(tools, replace(choice, mode="none", named=None), is_parallel=True, auto_parser=None)
    loose, choice = [replace(tool, is_strict=False) for tool in tools], replace(choice, allowed=None)
    return plan_tools(loose, choice, is_parallel=is_parallel, auto_parser=auto_parser, answer_form=answer_form)


def _is_allowed(tool: FunctionTool, choice: ToolChoice) -> bool:
    if choice.named is not None:
        return tool.name == choice.named
    return choice.allowed is None or tool.name in choice.allowed


def _constrains_calls(tools: Sequence[FunctionTool], called: Sequence[FunctionTool]) -> bool:
    """Return whether calls are constrained although the model may choose not to call."""
    return len(called) < len(tools) or any(tool.is_strict for tool in called)


def _form_of_calls(
    called: Sequence[FunctionTool], answer_form: StructuredOutputsParams | None, *, is_forced: bool
) -> StructuredOutputsParams:
    """Return the constraint on an answer: a call or, unless calls are forced, a final message."""
    answer = tag(HEAD + FINAL, ANY_TEXT, "") if answer_form is None else _answer_format(answer_form)
    if answer is None:
        assert answer_form is not None
        return _form_of_answer(answer_form)
    bound = [tool for tool in called if is_forced or tool.is_strict]
    messages = [_call(tool, tool.parameters if tool in bound else {"type": "object"}) for tool in called]
    if not is_forced:
        messages.append(answer)
    form = structural(sequence(any_of([_PREAMBLE, fixed("")]), any_of(messages)))
    if is_forced:
        return forced_form(called, structural_tag=form)
    return calls_form(bound, form, answer_form)


def _call(tool: FunctionTool, schema: Mapping[str, Any]) -> dict[str, Any]:
    return tag(f"{HEAD}{CHANNEL}commentary to={FUNCTIONS}{tool.name}{JSON}", json_of(dict(schema)), "")


def _form_of_answer(form: StructuredOutputsParams) -> StructuredOutputsParams:
    """Return the constraint on an answer without calls."""
    if form.start_after is not None or not form.kinds:
        return form
    answer = _answer_format(form)
    return (
        msgspec.structs.replace(form, start_after=FINAL) if answer is None else with_tag(form, structural(answer), {})
    )


def _answer_format(form: StructuredOutputsParams) -> dict[str, Any] | None:
    """Return the format of a final message for a constraint; `None` if no format can express the constraint."""
    if form.start_after is not None:
        return None
    if (schema := form_schema(form)) is not None:
        return tag(f"{HEAD}{CHANNEL}final{JSON}", json_of(schema), "")
    content: Mapping[str, Any] | None = None
    if form.regex is not None:
        content = {"type": "regex", "pattern": form.regex}
    elif form.choice is not None:
        content = any_of(map(fixed, form.choice))
    elif form.structural_tag is not None:
        given = parse_json(form.structural_tag) if isinstance(form.structural_tag, str) else form.structural_tag
        content = given.get("format")
    return None if content is None else tag(HEAD + FINAL, content, "")
