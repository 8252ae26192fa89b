"""`prepare_chat`: from a conversation to a generation that can start, and the parser of its output.

Each step takes the results of the steps before and changes none of them: plan the tools, render the prompt, find where
the output begins, constrain it, resolve the parameters. Generates nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from octavo.frontend.conversation.context import ChatContext
from octavo.frontend.conversation.output_parser import OutputParser
from octavo.frontend.conversation.rendering import last_text, render_prompt
from octavo.frontend.conversation.request import ChatRequest, ChatTool
from octavo.frontend.conversation.settings import ChatSettings
from octavo.frontend.generation.prepared import PreparedGeneration
from octavo.frontend.reasoning.parser import ReasoningParser, ReasoningState
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.frontend.tools.answer import AnswerFormat
from octavo.frontend.tools.parser import FunctionTool
from octavo.frontend.tools.plan import ToolPlan, plan_tools
from octavo.frontend.tools.schema import NO_PARAMETERS
from octavo.frontend.tools.subschema import MAX_DEPTH, is_too_deep
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.structured import StructuredOutputsParams

REASONING_LIMIT = "thinking_token_budget"
"""The caller's name of `max_reasoning_tokens`."""


@dataclass(frozen=True, slots=True)
class AnswerRendering:
    """How the output is shown as a message."""

    role: str = "assistant"
    echo: str = ""
    """Text that precedes the generated text."""
    parser: OutputParser | None = None
    """None: all of the output is content."""


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """What is generated for a conversation, and how it is shown."""

    generation: PreparedGeneration
    rendering: AnswerRendering


async def prepare_chat(request: ChatRequest, context: ChatContext) -> PreparedChat:
    """Check a request and return what is generated for it.

    Raises:
        InvalidRequestError: the request cannot be served; `param` names the field.
    """
    settings, client = context.settings, context.client
    plan = plan_tools(
        function_tools(request.input.tools),
        request.tool_choice,
        is_parallel=request.allows_parallel_calls,
        auto_parser=settings.auto_parser,
        answer_form=request.answer_form,
    )
    _check_reasoning_limit(request, settings.reasoning)
    shown = request.input
    if settings.hides_unused_tools and request.tool_choice.mode == "none":
        shown = replace(shown, tools=())
    text, state = _begin_output(await render_prompt(shown, context), request, plan, settings)
    token_ids = await client.tokenize(text, add_special_tokens=request.add_special_tokens)
    generation = request.generation.with_overrides(
        structured_outputs=_constrain(plan, request, state, settings.reasoning)
    )
    if _has_special_tags(plan, settings.reasoning, client.tokenizer):
        generation = generation.with_overrides(skip_special_tokens=False)
    return PreparedChat(
        context.resolver.prepare(generation, text, context.resolver.truncate(token_ids, generation)),
        AnswerRendering(
            role=settings.role if shown.add_generation_prompt else str(shown.messages[-1].get("role")),
            echo=_echo(request),
            parser=_output_parser(request, plan, state, context),
        ),
    )


def function_tools(tools: Sequence[ChatTool]) -> list[FunctionTool]:
    """Return the functions that a request offers.

    Raises:
        InvalidRequestError: a schema is nested too deeply.
    """
    functions = []
    for place, tool in enumerate(tools):
        if is_too_deep(tool.parameters):
            name = f"tools[{place}].function.parameters"
            raise InvalidRequestError(f"{name} is nested more than {MAX_DEPTH} levels deep", name)
        schema = NO_PARAMETERS if tool.parameters is None else {"type": "object", **tool.parameters}
        functions.append(FunctionTool(tool.name, schema, tool.is_strict, f"tools[{place}].function"))
    return functions


def _check_reasoning_limit(request: ChatRequest, reasoning: ReasoningParser | None) -> None:
    if request.max_reasoning_tokens is not None and reasoning is None:
        raise InvalidRequestError(
            f"{REASONING_LIMIT} needs a server that separates reasoning (--reasoning-parser)", REASONING_LIMIT
        )


def _begin_output(
    text: str, request: ChatRequest, plan: ToolPlan, settings: ChatSettings
) -> tuple[str, ReasoningState]:
    """Return the prompt, and whether the output begins inside the reasoning.

    A constraint applies after the reasoning, and a reasoning limit only to an output that begins with it. So if the
    template lets the model decide whether to reason, the prompt opens the reasoning, as the model itself would. A
    caller who wants none of it and a form gets the form at once, even if the template does not know `enable_thinking`:
    the model would reason up to the last token otherwise.
    """
    reasoning = settings.reasoning
    if reasoning is None:
        return text, ReasoningState.OUTSIDE
    shown = request.input
    state = reasoning.initial_state(text, last_text(shown.messages[-1]) if shown.continue_final_message else "")
    must_begin_in_form = plan.form is not None and not plan.begins_free
    variables = {**settings.template_defaults, **shown.variables}
    if must_begin_in_form and variables.get("enable_thinking") is False and shown.add_generation_prompt:
        closing = f"{reasoning.end}\n\n" if state is ReasoningState.INSIDE else ""
        return text + closing, ReasoningState.OUTSIDE
    must_know = must_begin_in_form or request.max_reasoning_tokens is not None
    if state is ReasoningState.UNDECIDED and must_know and shown.add_generation_prompt:
        return f"{text}{reasoning.begin}\n", ReasoningState.INSIDE
    return text, state


def _constrain(
    plan: ToolPlan, request: ChatRequest, state: ReasoningState, reasoning: ReasoningParser | None
) -> StructuredOutputsParams | None:
    """Return the constraint on the whole output: that of the tools or of the answer, after the reasoning.

    Raises:
        InvalidRequestError: the reasoning has a limit, and the constraint begins elsewhere.
    """
    form, limit = plan.form, request.max_reasoning_tokens
    if reasoning is None or state is not ReasoningState.INSIDE:
        return form
    if form is not None and form.start_after is None:
        form = msgspec.structs.replace(form, start_after=reasoning.end)
    if limit is None:
        return form
    if form is None:
        return StructuredOutputsParams(start_after=reasoning.end, max_free_tokens=limit, param=REASONING_LIMIT)
    if form.start_after != reasoning.end:
        raise InvalidRequestError(
            f"{REASONING_LIMIT} ends the reasoning with {reasoning.end!r}, but {form.name('start_after')} starts the "
            f"constraint after {form.start_after!r}: leave one of them out",
            REASONING_LIMIT,
        )
    return msgspec.structs.replace(form, max_free_tokens=limit)


def _has_special_tags(plan: ToolPlan, reasoning: ReasoningParser | None, tokenizer: Tokenizer) -> bool:
    """True if the parsers look for special tokens, which the text must then show."""
    tags = [*(plan.parser.tags if plan.parser else ()), *(reasoning.tags if reasoning else ())]
    return any(tokenizer.token_id(tag) in tokenizer.special_token_ids for tag in tags)


def _output_parser(
    request: ChatRequest, plan: ToolPlan, state: ReasoningState, context: ChatContext
) -> OutputParser | None:
    reasoning = context.settings.reasoning
    if plan.parser is None and reasoning is None:
        return None
    answer_format = AnswerFormat(reasoning, state, plan.parser, plan.max_calls)
    return OutputParser(answer_format, context.client.tokenizer, request.shows_reasoning, plan.is_named)


def _echo(request: ChatRequest) -> str:
    """Return the text of a last message that the answer continues and repeats."""
    last = request.input.messages[-1]
    return last_text(last) if request.echoes_last_message and last.get("role") == "assistant" else ""
