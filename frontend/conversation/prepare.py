"""`prepare_chat`: turns a conversation into a generation that is ready to start, and the parser of its output.

Each step uses the results of earlier steps without changing them: plan the tools, render the prompt, find where the
output begins, constrain it, resolve the parameters. Generates nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.frontend.conversation.context import ChatContext
from octavo.frontend.conversation.output_parser import OutputFormat, OutputParser
from octavo.frontend.conversation.plugins import plugin_format
from octavo.frontend.conversation.reasoning import begin_output, check_reasoning_limit, constrain_output
from octavo.frontend.conversation.rendering import last_text, render_prompt
from octavo.frontend.conversation.request import ChatInput, ChatRequest, ChatTool
from octavo.frontend.generation.chat_embeds import EmbedsPart, take_embeds
from octavo.frontend.generation.prepared import PreparedGeneration
from octavo.frontend.generation.prompt import TokenizedPrompt
from octavo.frontend.generation.request import GenerationRequest
from octavo.frontend.harmony.format import HarmonyFormat
from octavo.frontend.harmony.header import CALL, RETURN
from octavo.frontend.harmony.plan import HarmonyPlan, plan_harmony
from octavo.frontend.harmony.prompt import harmony_messages
from octavo.frontend.media.parts import MediaOptions, MediaSource
from octavo.frontend.media.prompts import PromptMaker
from octavo.frontend.media.sources import KWARGS
from octavo.frontend.plugins.format import PluginFormat
from octavo.frontend.reasoning.parser import ReasoningParser, ReasoningState
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.frontend.tools.answer import AnswerFormat
from octavo.frontend.tools.parser import FunctionTool
from octavo.frontend.tools.plan import ToolPlan, plan_tools
from octavo.frontend.tools.schema import NO_PARAMETERS
from octavo.frontend.tools.subschema import MAX_DEPTH, is_too_deep
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.ids import pack_ids
from octavo.protocol.media import MediaItem
from octavo.protocol.prompt_embeds import PromptEmbeds

if TYPE_CHECKING:
    from octavo.frontend.client import AsyncClient


@dataclass(frozen=True, slots=True)
class AnswerRendering:
    """How to show the output as a message."""

    role: str = "assistant"
    echo: str = ""
    """Text to put before the generated text."""
    parser: OutputParser | None = None
    """The parser of the output; `None` if all of it is content."""


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """The generation for a conversation, and how to show its output."""

    generation: PreparedGeneration
    rendering: AnswerRendering


async def prepare_chat(request: ChatRequest, context: ChatContext) -> PreparedChat:
    """Check a request, and return the prepared generation.

    Raises:
        InvalidRequestError: the request cannot be served; `param` names the field.
    """
    settings, client = context.settings, context.client
    plan = _plan(request, context)
    check_reasoning_limit(request, settings.reasoning)
    reasoning = None if settings.reasoning is None else settings.reasoning.for_tokenizer(client.tokenizer)
    shown = request.input
    if settings.hides_unused_tools and request.tool_choice.mode == "none":
        shown = replace(shown, tools=())
    if settings.is_harmony:
        knows_thinking = "thinking" in (shown.template or context.chat_template.source)
        shown = replace(shown, messages=harmony_messages(shown.messages, knows_thinking=knows_thinking))
    shown, parts = await _take_parts(shown, client.media, request)
    if request.prompt_token_ids is None:
        rendered, reused = await render_prompt(shown, context), []
    else:
        reused = list(request.prompt_token_ids)
        rendered = await client.run_in_thread(lambda: client.tokenizer.decode(reused, skip_special_tokens=False))
    text, state = rendered, ReasoningState.OUTSIDE
    if reasoning is not None:
        text, state = begin_output(text, request, plan, context, reasoning)
    if reused:  # only new text, such as the mark that opens the reasoning, needs tokenizing
        prompt = _Prompt(reused + (await client.tokenize(new) if (new := text[len(rendered) :]) else []))
    else:
        prompt = await _prompt_of(text, parts, client, request)
    form = constrain_output(plan, request, state, reasoning)
    generation = request.generation.with_overrides(structured_outputs=form)
    if _has_special_tags(plan, reasoning, client.tokenizer):
        generation = generation.with_overrides(skip_special_tokens=False)
    parser = _output_parser(request, plan, reasoning, state, context, text, prompt.token_ids)
    if parser is not None and isinstance(parser.format, PluginFormat) and parser.format.shows_special_tokens:
        generation = generation.with_overrides(skip_special_tokens=False)
    if settings.is_harmony:
        generation = _with_stop_marks(generation, client.tokenizer)
    return PreparedChat(
        _prepared(generation, text, prompt, context),
        AnswerRendering(
            role=settings.role if shown.add_generation_prompt else str(shown.messages[-1].get("role")),
            echo=_echo(request),
            parser=parser,
        ),
    )


def function_tools(tools: Sequence[ChatTool]) -> list[FunctionTool]:
    """Return the functions of a request's tools.

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


@dataclass(frozen=True, slots=True)
class _Parts:
    """Parts of the messages that the template does not see."""

    media: Sequence[MediaSource] = ()
    embeds: Sequence[EmbedsPart] = ()


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A tokenized prompt, with placeholders at the rows of media or prompt embeddings."""

    token_ids: list[int]
    media: tuple[MediaItem, ...] = ()
    embeds: PromptEmbeds | None = None


async def _take_parts(shown: ChatInput, media: PromptMaker | None, request: ChatRequest) -> tuple[ChatInput, _Parts]:
    """Return the input with marks in place of media and embeddings, and these parts."""
    messages, embeds = take_embeds(shown.messages)
    if embeds and request.prompt_token_ids is not None:
        raise InvalidRequestError(
            "prompt_embeds cannot be combined with prompt_token_ids: leave it out", embeds[0].path
        )
    if media is None:
        if request.processor_kwargs:
            raise InvalidRequestError("mm_processor_kwargs: the model reads text only: leave it out", KWARGS)
        return replace(shown, messages=messages), _Parts(embeds=embeds)
    messages, sources = await media.extract(messages)
    if sources and embeds:
        raise InvalidRequestError("a request with media cannot have prompt_embeds: leave them out", embeds[0].path)
    for name, given in (("chat_template", shown.template), ("prompt_token_ids", request.prompt_token_ids)):
        if sources and given is not None:
            raise InvalidRequestError(f"a request with media cannot bring {name}: leave it out", name)
    return replace(shown, messages=messages), _Parts(sources, embeds)


async def _prompt_of(text: str, parts: _Parts, client: "AsyncClient", request: ChatRequest) -> _Prompt:
    adds_special_tokens = request.add_special_tokens
    if client.media is not None and parts.media:
        options = MediaOptions(request.processor_kwargs, request.generation.cache_salt)
        made = await client.media.of_text(text, parts.media, adds_special_tokens=adds_special_tokens, options=options)
        return _Prompt(made.token_ids, made.items)
    if parts.embeds:
        rows = await client.preparer.prompt_with_embeds(text, parts.embeds, adds_special_tokens=adds_special_tokens)
        return _Prompt(list(rows.token_ids), embeds=rows.embeds)
    return _Prompt(await client.tokenize(text, add_special_tokens=adds_special_tokens))


def _prepared(generation: GenerationRequest, text: str, prompt: _Prompt, context: ChatContext) -> PreparedGeneration:
    if prompt.embeds is not None:
        rows = TokenizedPrompt(None, pack_ids(prompt.token_ids), prompt.embeds)
        return context.resolver.prepare_embeds(generation, rows)
    token_ids = context.resolver.truncate(prompt.token_ids, generation)
    return context.resolver.prepare(generation, text, token_ids, prompt.media)


def _plan(request: ChatRequest, context: ChatContext) -> ToolPlan:
    tools, settings = function_tools(request.input.tools), context.settings
    if not settings.is_harmony:
        return plan_tools(
            tools,
            request.tool_choice,
            is_parallel=request.allows_parallel_calls,
            auto_parser=settings.auto_parser,
            answer_form=request.answer_form,
        )
    return plan_harmony(
        tools,
        request.tool_choice,
        is_parallel=request.allows_parallel_calls,
        auto_parser=settings.auto_parser,
        answer_form=request.answer_form,
        is_continued=request.input.continue_final_message,
    )


def _with_stop_marks(generation: GenerationRequest, tokenizer: Tokenizer) -> GenerationRequest:
    """Make the marks that end an answer stop it, although a model's configuration may not list them as stop tokens."""
    stops = set(generation.overrides.get("stop_token_ids") or ())
    marks = {tokenizer.token_id(mark) for mark in (CALL, RETURN)} & tokenizer.special_token_ids
    return generation.with_overrides(stop_token_ids=sorted(stops | marks)) if marks - stops else generation


def _has_special_tags(plan: ToolPlan, reasoning: ReasoningParser | None, tokenizer: Tokenizer) -> bool:
    """Return whether the parsers need special tokens, which the text must then contain."""
    tags = [*(plan.parser.tags if plan.parser else ()), *(reasoning.marks if reasoning else ())]
    return any(tokenizer.token_id(tag) in tokenizer.special_token_ids for tag in tags)


def _output_parser(
    request: ChatRequest,
    plan: ToolPlan,
    reasoning: ReasoningParser | None,
    state: ReasoningState,
    context: ChatContext,
    prompt: str,
    token_ids: Sequence[int],
) -> OutputParser | None:
    tokenizer = context.client.tokenizer
    if isinstance(plan, HarmonyPlan):
        harmony = HarmonyFormat(prompt, plan.functions, plan.max_calls)
        return OutputParser(harmony, tokenizer, request.shows_reasoning, plan.is_named)
    if plan.parser is None and reasoning is None:
        return None
    if reasoning is not None and not plan.has_model_calls:
        reasoning = replace(reasoning, call_marks=())
    if reasoning is not None and plan.form is not None and state is ReasoningState.INSIDE:
        reasoning = replace(reasoning, call_marks=())  # the constraint begins only after the closing mark
    answer = AnswerFormat(reasoning, state, plan.parser, plan.max_calls)
    outputs: OutputFormat = plugin_format(answer, request, tokenizer, token_ids) or answer
    return OutputParser(outputs, tokenizer, request.shows_reasoning, plan.is_named)


def _echo(request: ChatRequest) -> str:
    """Return the text of the last message, if the answer continues and repeats it."""
    last = request.input.messages[-1]
    return last_text(last) if request.echoes_last_message and last.get("role") == "assistant" else ""
