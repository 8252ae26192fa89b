"""Tool choice and answer form of a request, as the grammar of an answer in channels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from octavo.frontend.harmony.header import CHANNEL, CONSTRAIN, END, FUNCTIONS, MESSAGE, START
from octavo.frontend.tools.parser import FunctionTool, ToolParser
from octavo.frontend.tools.plan import SPACE, ToolChoice, ToolPlan, plan_tools
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.structured import StructuredOutputsParams, parse_json

Format = dict[str, Any]
"""A format of a structural tag (docs/structured-output.md)."""

HEAD = f"{START}assistant"
"""Begins every message after the reasoning."""
FINAL = f"{CHANNEL}final{MESSAGE}"
JSON = f" {CONSTRAIN}json{MESSAGE}"

_ANY: Format = {"type": "any_text"}
_NOTHING: Format = {"type": "const_string", "value": ""}
_PREAMBLE: Format = {"type": "tag", "begin": f"{HEAD}{CHANNEL}commentary{MESSAGE}", "content": _ANY, "end": END}


@dataclass(frozen=True, slots=True)
class HarmonyPlan(ToolPlan):
    """A plan for an answer in channels."""

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
    """Return the plan for a request's tools and the form of its answer.

    The form applies after the reasoning, to the messages that follow: a call ends the answer, so there is only one.

    Args:
        tools: the request's tools.
        choice: the request's `tool_choice`.
        is_parallel: an answer may contain several calls.
        auto_parser: None: `tool_choice` auto is not enabled.
        answer_form: the form of an answer without calls; None: unconstrained.
        is_continued: the answer continues the text of a message, which is in the final channel.

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
    elif called and (choice.is_forced or answer_form is not None or _binds_calls(tools, called)):
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
    """Check a request as for every other format; return that plan, whose form is not in channels."""
    plan_tools(tools, replace(choice, mode="none", named=None), is_parallel=True, auto_parser=None)
    loose, choice = [replace(tool, is_strict=False) for tool in tools], replace(choice, allowed=None)
    return plan_tools(loose, choice, is_parallel=is_parallel, auto_parser=auto_parser, answer_form=answer_form)


def _is_allowed(tool: FunctionTool, choice: ToolChoice) -> bool:
    if choice.named is not None:
        return tool.name == choice.named
    return choice.allowed is None or tool.name in choice.allowed


def _binds_calls(tools: Sequence[FunctionTool], called: Sequence[FunctionTool]) -> bool:
    """Return whether calls are constrained although the model may choose not to call."""
    return len(called) < len(tools) or any(tool.is_strict for tool in called)


def _form_of_calls(
    called: Sequence[FunctionTool], answer_form: StructuredOutputsParams | None, *, is_forced: bool
) -> StructuredOutputsParams:
    """Return the form of an answer that is a call of one of the functions or, unless calls are forced, an answer."""
    answer: Format | None = {"type": "tag", "begin": HEAD + FINAL, "content": _ANY, "end": ""}
    if answer_form is not None:
        answer = _answer_format(answer_form)
    if answer is None:
        assert answer_form is not None
        return _form_of_answer(answer_form)
    bound = [tool for tool in called if is_forced or tool.is_strict]
    messages = [_call(tool, tool.parameters if tool in bound else {"type": "object"}) for tool in called]
    if not is_forced:
        messages.append(answer)
    preamble: Format = {"type": "or", "elements": [_PREAMBLE, _NOTHING]}
    tag = _tag_of({"type": "sequence", "elements": [preamble, {"type": "or", "elements": messages}]})
    schemas = {f"{tool.param}.parameters": dict(tool.parameters) for tool in bound}
    if is_forced:
        param = f"{called[0].param}.parameters" if len(called) == 1 else "tools"
        return StructuredOutputsParams(
            structural_tag=tag,
            disable_additional_properties=True,
            whitespace_pattern=SPACE,
            param=param,
            schemas=schemas,
        )
    if answer_form is None:
        return StructuredOutputsParams(structural_tag=tag, param="tools", schemas=schemas)
    return _with_tag(answer_form, tag, schemas)


def _call(tool: FunctionTool, schema: Mapping[str, Any]) -> Format:
    begin = f"{HEAD}{CHANNEL}commentary to={FUNCTIONS}{tool.name}{JSON}"
    content = {"type": "json_schema", "json_schema": dict(schema)}
    return {"type": "tag", "begin": begin, "content": content, "end": ""}


def _form_of_answer(form: StructuredOutputsParams) -> StructuredOutputsParams:
    """Return the form of an answer without calls."""
    if form.start_after is not None or not form.kinds:
        return form
    answer = _answer_format(form)
    return msgspec.structs.replace(form, start_after=FINAL) if answer is None else _with_tag(form, _tag_of(answer), {})


def _answer_format(form: StructuredOutputsParams) -> Format | None:
    """Return the format of a final message of a form; None: no format can contain this form."""
    begin = HEAD + FINAL
    content: Format | None = None
    if form.start_after is not None:
        return None
    if (schema := _schema(form)) is not None:
        begin, content = f"{HEAD}{CHANNEL}final{JSON}", {"type": "json_schema", "json_schema": schema}
    elif form.regex is not None:
        content = {"type": "regex", "pattern": form.regex}
    elif form.choice is not None:
        elements: list[Format] = [{"type": "const_string", "value": text} for text in form.choice]
        content = {"type": "or", "elements": elements}
    elif form.structural_tag is not None:
        tag = parse_json(form.structural_tag) if isinstance(form.structural_tag, str) else form.structural_tag
        content = tag.get("format")
    return None if content is None else {"type": "tag", "begin": begin, "content": content, "end": ""}


def _with_tag(
    form: StructuredOutputsParams, tag: Format, schemas: dict[str, dict[str, Any]]
) -> StructuredOutputsParams:
    """Return a form in the notation of structural tags, whose errors name the caller's field."""
    name = form.name(form.kinds[0])
    schema = _schema(form)
    own = {} if schema is None else {name: schema}
    return msgspec.structs.replace(
        form,
        json=None,
        json_object=None,
        regex=None,
        choice=None,
        structural_tag=tag,
        param=name,
        schemas={**own, **schemas} or None,
    )


def _schema(form: StructuredOutputsParams) -> dict[str, Any] | None:
    """Return the JSON schema of a form, None if it has none."""
    if form.json_object:
        return {"type": "object"}
    if form.json is None:
        return None
    return dict(parse_json(form.json) if isinstance(form.json, str) else form.json)


def _tag_of(form: Format) -> Format:
    return {"type": "structural_tag", "format": form}
