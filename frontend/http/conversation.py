"""What a chat request's own fields ask for: tools, reasoning, and the variables of the template. Generates nothing."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.frontend.http.render.reading import Reading
from octavo.frontend.http.schemas.chat import (
    AllowedToolsChoice,
    ChatCompletionRequest,
    NamedToolChoice,
    ToolDefinition,
)
from octavo.frontend.http.structured import structured_outputs_of
from octavo.frontend.reasoning.parser import Opening, ReasoningParser, reasoning_parser
from octavo.frontend.text.chat_template import ChatTemplate, FormatChoice
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.frontend.tools.answer import AnswerFormat
from octavo.frontend.tools.parser import FunctionTool, ToolParser
from octavo.frontend.tools.plan import ToolChoice, plan_tools
from octavo.frontend.tools.registry import load_plugin, tool_parser
from octavo.frontend.tools.schema import NO_PARAMETERS
from octavo.frontend.tools.subschema import MAX_DEPTH, is_too_deep
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import ConfigError, InvalidRequestError
from octavo.protocol.params import SamplingParams
from octavo.protocol.structured import StructuredOutputsParams

logger = logging.getLogger(__name__)


THOUGHT_LIMIT = "thinking_token_budget"

RESERVED_VARIABLES = frozenset({"messages", "self"})
"""Variables of a template that nobody may set by name."""


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How this server treats conversations."""

    content_format: FormatChoice = "auto"
    template_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template, for requests that do not set them."""
    auto_parser: type[ToolParser] | None = None
    """Reads the calls that the model makes of its own accord; None: it may make none."""
    hides_unused_tools: bool = False
    """Under tool_choice none the prompt says nothing of tools."""
    reasoning: ReasoningParser | None = None

    @classmethod
    def of(cls, config: ServerConfig) -> "ChatSettings":
        """Return what the flags say.

        Raises:
            ConfigError: a parser is unknown or missing, the plugin does not load, or the template's defaults are wrong.
        """
        if config.tool_parser_plugin is not None:
            load_plugin(config.tool_parser_plugin)
        parser = None if config.tool_call_parser is None else tool_parser(config.tool_call_parser)
        if parser is not None and not config.enable_auto_tool_choice:
            logger.warning("--tool-call-parser is of no use without --enable-auto-tool-choice")
        if config.enable_auto_tool_choice and parser is None:
            raise ConfigError(
                "--enable-auto-tool-choice needs to know how the model writes its calls",
                phase="choosing the tool parser",
                hint="add --tool-call-parser hermes, llama3_json, mistral, pythonic or qwen3_xml",
            )
        return cls(
            content_format=config.chat_template_content_format,
            template_defaults=_template_defaults(config.default_chat_template_kwargs),
            auto_parser=parser if config.enable_auto_tool_choice else None,
            hides_unused_tools=config.exclude_tools_when_tool_choice_none,
            reasoning=None if config.reasoning_parser is None else reasoning_parser(config.reasoning_parser),
        )


def _template_defaults(text: str | None) -> dict[str, Any]:
    try:
        defaults = msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"default_chat_template_kwargs is no JSON object: {error}",
            phase="configuration",
            hint="""write --default-chat-template-kwargs '{"enable_thinking": false}'""",
        ) from None
    if taken := defaults.keys() & RESERVED_VARIABLES:
        raise ConfigError(f"default_chat_template_kwargs must not hold {min(taken)!r}", phase="configuration")
    return defaults


class Conversation:
    """One chat request's plan: made before the prompt, finished when that is known.

    Args:
        asked: the request.
        settings: of the server.

    Raises:
        InvalidRequestError: its tools ask for what cannot be.
    """

    def __init__(self, asked: ChatCompletionRequest, settings: ChatSettings) -> None:
        self._asked = asked
        self._settings = settings
        choice = _tool_choice(asked)
        self._plan = plan_tools(
            function_tools(asked),
            choice,
            is_parallel=asked.parallel_tool_calls is not False,
            auto_parser=settings.auto_parser,
            answer_form=_answer_form(asked, choice),
        )
        self._opening = Opening.OUTSIDE
        self._thought_limit = _thought_limit(asked, settings.reasoning)

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools as the template gets them."""
        hides = self._asked.tool_choice == "none" and self._settings.hides_unused_tools
        return None if hides or not self._asked.tools else [shown_tool(tool) for tool in self._asked.tools]

    def variables(self, template: ChatTemplate | None) -> dict[str, Any]:
        """Return the template's variables that the request sets by fields of their own.

        Args:
            template: None: the request brings its own, which knows what it is given.

        Raises:
            InvalidRequestError: the template does not know such a variable.
        """
        effort = self._asked.reasoning_effort
        if effort is None:
            return {}
        if effort == "none" and template is not None and template.knows("enable_thinking"):
            return {"enable_thinking": False}
        if template is None or template.knows("reasoning_effort"):
            return {"reasoning_effort": effort}
        if effort == "none" and self._settings.reasoning is None:
            return {}
        raise InvalidRequestError(
            "this model's chat template knows no reasoning_effort: leave it out", "reasoning_effort"
        )

    def prompt(self, text: str) -> str:
        """Return the prompt, given what the template has made, and note how the answer will begin.

        A form can bind an answer only behind its reasoning, and a limit only an answer that begins with it. Where the
        template leaves it to the model whether to reason, the prompt then opens the reasoning, as the model itself
        would.
        """
        reasoning = self._settings.reasoning
        if reasoning is None:
            return text
        self._opening = reasoning.opening(text, self._continued())
        must_know = self._must_begin_in_form() or self._thought_limit is not None
        if self._opening is Opening.UNSURE and must_know and self._asked.add_generation_prompt:
            self._opening = Opening.INSIDE
            return f"{text}{reasoning.begin}\n"
        return text

    def bind(self, params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
        """Return the parameters with what binds the answer to its form, and shows its marks."""
        form = self._plan.form
        if form is not None and self._opening is Opening.INSIDE and form.start_after is None:
            assert self._settings.reasoning is not None
            form = msgspec.structs.replace(form, start_after=self._settings.reasoning.end)
        if self._thought_limit is not None and self._opening is Opening.INSIDE:
            form = self._with_limited_thoughts(form, self._thought_limit)
        marks = [*(self._plan.parser.tags if self._plan.parser else ())]
        marks += self._settings.reasoning.tags if self._settings.reasoning else ()
        has_special_marks = any(tokenizer.token_id(mark) in tokenizer.special_token_ids for mark in marks)
        shows_marks = params.skip_special_tokens and has_special_marks
        if form is None and not shows_marks:
            return params
        return params.clone(structured_outputs=form, skip_special_tokens=params.skip_special_tokens and not shows_marks)

    def reading(self, tokenizer: Tokenizer) -> Reading | None:
        """Return how the answers are read; None when all of them is content."""
        plan, reasoning = self._plan, self._settings.reasoning
        if plan.parser is None and reasoning is None:
            return None
        style = AnswerFormat(reasoning, self._opening, plan.parser, plan.max_calls)
        return Reading(style, tokenizer, self._asked.include_reasoning, plan.is_named)

    def _with_limited_thoughts(
        self, form: StructuredOutputsParams | None, max_tokens: int
    ) -> StructuredOutputsParams | None:
        """Return a form whose reasoning ends after so many tokens.

        Raises:
            InvalidRequestError: the form begins elsewhere.
        """
        assert self._settings.reasoning is not None, "a server without a reasoning parser refuses limits"
        end = self._settings.reasoning.end
        if form is None:
            return StructuredOutputsParams(start_after=end, max_free_tokens=max_tokens, param=THOUGHT_LIMIT)
        if form.start_after != end:
            raise InvalidRequestError(
                f"{THOUGHT_LIMIT} ends the reasoning with {end!r}, and {form.name('start_after')} says that the form "
                f"begins after {form.start_after!r}: leave one of them out",
                THOUGHT_LIMIT,
            )
        return msgspec.structs.replace(form, max_free_tokens=max_tokens)

    def _must_begin_in_form(self) -> bool:
        return self._plan.form is not None and not self._plan.begins_free

    def _continued(self) -> str:
        return last_text(self._asked.messages[-1]) if self._asked.continue_final_message else ""


def _tool_choice(asked: ChatCompletionRequest) -> ToolChoice:
    match asked.tool_choice:
        case NamedToolChoice(function=function):
            return ToolChoice(named=function.name)
        case AllowedToolsChoice(allowed_tools=some):
            return ToolChoice(some.mode, allowed=frozenset(tool.function.name for tool in some.tools))
        case mode:
            return ToolChoice(mode or "auto")


def _thought_limit(asked: ChatCompletionRequest, reasoning: ReasoningParser | None) -> int | None:
    """Return how many tokens of reasoning there may be; None: any number."""
    limit = asked.thinking_token_budget
    if limit is None or limit == -1:
        return None
    if reasoning is None:
        raise InvalidRequestError(
            f"{THOUGHT_LIMIT} needs a server that tells reasoning apart (--reasoning-parser)", THOUGHT_LIMIT
        )
    return limit


def _answer_form(asked: ChatCompletionRequest, choice: ToolChoice) -> StructuredOutputsParams | None:
    """Return what an answer that does not call must look like; None: anything will do, or there is no such answer.

    OpenAI's API takes a response_format beside calls that must be made, and agents send it with every request.
    """
    form = structured_outputs_of(asked)
    if form is not None:
        form.verify()
    return None if choice.is_forced and asked.tools and asked.response_format is not None else form


def function_tools(asked: ChatCompletionRequest) -> list[FunctionTool]:
    """Return the functions that a request offers.

    Raises:
        InvalidRequestError: a schema is nested too deeply.
    """
    tools = []
    for place, tool in enumerate(asked.tools or []):
        parameters = tool.function.parameters
        if is_too_deep(parameters):
            name = f"tools[{place}].function.parameters"
            raise InvalidRequestError(f"{name} is nested more than {MAX_DEPTH} levels deep", name)
        schema = NO_PARAMETERS if parameters is None else {"type": "object", **parameters}
        tools.append(FunctionTool(tool.function.name, schema, bool(tool.function.strict), f"tools[{place}].function"))
    return tools


def shown_tool(tool: ToolDefinition) -> dict[str, Any]:
    """Return a tool as templates know it: without what only concerns the API."""
    function = tool.function
    shown: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    shown["parameters"] = dict(NO_PARAMETERS) if function.parameters is None else function.parameters
    return {"type": tool.type, "function": shown}


def last_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message's content."""
    content = message.get("content")
    parts: Sequence[Any] = content if isinstance(content, list) else [content]
    return "".join(part if isinstance(part, str) else str((part or {}).get("text") or "") for part in parts)


@contextmanager
def own_names(asked: ChatCompletionRequest) -> Iterator[None]:
    """Let errors name the fields that the request has, not those that they become.

    Raises:
        InvalidRequestError: as it came, but for the name.
    """
    names = {"prompt": "messages"}
    if asked.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if asked.top_logprobs is not None:
        names["logprobs"] = "top_logprobs"
    try:
        yield
    except InvalidRequestError as error:
        if error.param not in names:
            raise
        name = names[error.param]
        message = error.message if error.param == "prompt" else error.message.replace(error.param, name, 1)
        raise type(error)(message, name) from error
