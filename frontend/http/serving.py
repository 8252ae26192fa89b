"""`Serving`: what every route needs, and what all generating routes do before they generate."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from octavo.frontend.http.conversation import RESERVED_VARIABLES, ChatSettings
from octavo.frontend.http.message import Request
from octavo.frontend.http.render.answer import AnswerSettings, AnswerStyle
from octavo.frontend.http.render.logprobs import TokenNames
from octavo.frontend.http.request_log import RequestLog
from octavo.frontend.http.schemas.sampling import SamplingFields, StreamOptions
from octavo.frontend.http.structured import structured_outputs_of
from octavo.frontend.text.chat_template import ChatTemplate
from octavo.frontend.text.messages import Message
from octavo.frontend.text.template_process import TemplateProcesses
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import InvalidRequestError, ModelNotFoundError
from octavo.protocol.params import MAX_N, MAX_STOP_STRINGS, OutputKind, SamplingParams

if TYPE_CHECKING:
    from octavo.frontend.client import AsyncClient
    from octavo.frontend.metrics.exporter import Metrics


SHORT_TEXT_CHARS = 2_000
"""A conversation up to this length is rendered in less time than a thread switch takes to pay off."""


MESSAGE_CHARS = 20
"""A message costs as much as this much more text."""


class TemplateFields(Protocol):
    """The fields of a request that say how its messages become a prompt."""

    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    documents: list[dict[str, Any]] | None


@dataclass(frozen=True)
class Serving:
    """One engine behind one HTTP application."""

    client: "AsyncClient"
    metrics: "Metrics"
    trusts_request_templates: bool = False
    """Whether a request may bring its own chat template."""
    max_n_sequences: int = MAX_N
    """Most sequences of one request, over all its prompts."""
    max_stop_strings: int = MAX_STOP_STRINGS
    chat: ChatSettings = field(default_factory=ChatSettings)
    profiler_dir: Path | None = None
    """Where traces go; None: none are made."""
    forces_usage: bool = False
    """Streams tell of usage unasked."""
    request_log: RequestLog | None = None
    """Tells of requests and answers; None: nothing does."""
    answers: AnswerSettings = field(default_factory=AnswerSettings)
    stall_deadline_s: float = 25.0
    """How long the engine may have work and not finish a step before it counts as stalled."""
    created: int = field(default_factory=lambda: int(time.time()))
    """When serving began, in seconds since the epoch: the models' creation time."""
    _defaults: dict[int | None, tuple[ResolvedConfig, SamplingParams]] = field(default_factory=dict)
    """The model's own parameters, by what silence on max_tokens means, and whose they are: engines are replaced."""
    _apart: TemplateProcesses = field(default_factory=TemplateProcesses)
    """Renders the templates that requests bring."""

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The engine's chat template, read once.

        Raises:
            InvalidRequestError: there is none, or it does not parse.
        """
        return self.client.chat_template(self.chat.content_format)

    def now(self) -> int:
        """Return the time of an answer, in seconds since the epoch."""
        return int(time.time())

    def model_name(self, asked: str | None) -> str:
        """Return the name to answer with.

        Raises:
            ModelNotFoundError: this server does not serve `asked`.
        """
        names = self.client.facts.served_model_names
        if asked is None:
            return names[0]
        if asked not in names:
            raise ModelNotFoundError(f"the model {asked!r} is not served here: use {' or '.join(map(repr, names))}")
        return asked

    async def render_chat(
        self,
        fields: TemplateFields,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of a conversation, rendered off the event loop unless that is sure to be short.

        Args:
            fields: of the request.
            messages: of the conversation.
            tools: as the template gets them.
            variables: of the template; the request's own `chat_template_kwargs` win over them.

        Raises:
            InvalidRequestError: there is no chat template, it may not be used, or it refuses the messages.
        """
        self.client.tokenizer.require("messages")
        variables = {
            **self.chat.template_defaults,
            "add_generation_prompt": fields.add_generation_prompt,
            "continue_final_message": fields.continue_final_message,
            "documents": fields.documents,
            "tools": tools,
            **(variables or {}),
            **(fields.chat_template_kwargs or {}),
        }
        if taken := variables.keys() & RESERVED_VARIABLES:
            raise InvalidRequestError(f"chat_template_kwargs must not hold {min(taken)!r}", "chat_template_kwargs")
        if fields.chat_template is not None:
            if not self.trusts_request_templates:
                raise InvalidRequestError(
                    "this server takes no chat templates from requests (--trust-request-chat-template)", "chat_template"
                )
            special_tokens, content_format = self.client.tokenizer.special_tokens, self.chat.content_format
            return await self._apart.render(fields.chat_template, special_tokens, content_format, messages, variables)
        is_plain = not (fields.chat_template_kwargs or fields.documents or tools)
        if is_plain and _num_chars(messages) <= SHORT_TEXT_CHARS:
            return self.chat_template.render(messages, **variables)
        return await self.client.run_in_thread(lambda: self.chat_template.render(messages, **variables))

    def cut_prompt(self, token_ids: list[int], asked: SamplingFields, max_tokens: int | None) -> list[int]:
        """Return the tokens that `truncate_prompt_tokens` leaves of a prompt."""
        keep = asked.truncate_prompt_tokens
        if keep is None:
            return token_ids
        if keep == -1:
            keep = max(1, self.client.facts.max_model_len - (max_tokens or 1))
        if len(token_ids) <= keep:
            return token_ids
        return token_ids[:keep] if asked.truncation_side == "right" else token_ids[len(token_ids) - keep :]

    def check_num_sequences(self, n: int, num_prompts: int) -> None:
        """Refuse a request for too many sequences.

        Raises:
            InvalidRequestError: n sequences for each prompt are more than the limit.
        """
        if n * num_prompts > self.max_n_sequences:
            prompts = f" for each of {num_prompts} prompts" if num_prompts > 1 else ""
            raise InvalidRequestError(
                f"n={n}{prompts} exceeds the {self.max_n_sequences} sequences that one request may ask for "
                "(--max-n-sequences)",
                "n",
            )

    def sampling_params(
        self,
        asked: SamplingFields,
        *,
        num_prompt_tokens: int,
        max_tokens: int | None,
        default_max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        """Return the request's parameters over the model's own defaults.

        Args:
            asked: the request.
            num_prompt_tokens: of the prompt, after cutting.
            max_tokens: None where the request is silent.
            default_max_tokens: what silence means, unless the model says; None: what is left of the context.
            logprobs: as in `SamplingParams`; without meaning where the request names the tokens.
            prompt_logprobs: likewise.

        Raises:
            InvalidRequestError: a field is out of range.
        """
        self.check_num_sequences(asked.n or 1, 1)
        stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        if len(stops) > self.max_stop_strings:
            raise InvalidRequestError(f"at most {self.max_stop_strings} stop strings, got {len(stops)}", "stop")
        defaults = self._default_params(default_max_tokens)
        if max_tokens is None and defaults.max_tokens is not None:
            # A limit that nobody asked for must not make a prompt too long.
            room = self.client.facts.max_model_len - num_prompt_tokens
            max_tokens = max(1, min(defaults.max_tokens, room))
        said = {name: value for name in _SAMPLING_FIELDS if (value := getattr(asked, name)) is not None}
        if asked.use_beam_search:
            said["temperature"] = 1.0  # nothing is drawn: several sequences differ at any temperature
        return defaults.clone(
            **said,
            max_tokens=max_tokens,
            logprobs=None if asked.logprob_token_ids else logprobs,
            prompt_logprobs=prompt_logprobs,
            structured_outputs=structured_outputs_of(asked),
            output_kind=OutputKind.DELTA if asked.stream else OutputKind.FINAL_ONLY,
        )

    def _default_params(self, max_tokens: int | None) -> SamplingParams:
        config, params = self._defaults.get(max_tokens, (None, None))
        if params is None or config is not self.client.config:
            params = self.client.default_params(max_tokens=max_tokens)
            self._defaults[max_tokens] = self.client.config, params
        return params


_SAMPLING_FIELDS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
    *("allowed_token_ids", "bad_words", "stream_interval", "repetition_detection", "logprob_token_ids"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
)
"""Request fields that are `SamplingParams` fields of the same name."""


def _num_chars(messages: Sequence[Message]) -> int:
    """Return how much work a template has, as text; a content in parts counts as too long to tell."""
    num_chars = MESSAGE_CHARS * len(messages)
    for message in messages:
        content = message.get("content")
        num_chars += len(content) if isinstance(content, str) else SHORT_TEXT_CHARS + 1
    return num_chars


def answer_style(
    serving: Serving, asked: SamplingFields, answer_id: str, model: str, num_logprobs: int | None
) -> AnswerStyle:
    """Return how a request is answered, as far as chat and plain completions have it in common."""
    settings = serving.answers
    options = asked.stream_options or StreamOptions()
    has_usage = bool(options.include_usage) or serving.forces_usage
    as_ids = settings.names_are_ids if asked.return_tokens_as_token_ids is None else asked.return_tokens_as_token_ids
    tokenizer = serving.client.tokenizer
    return AnswerStyle(
        id=answer_id,
        created=serving.now(),
        model=model,
        names=TokenNames(tokenizer, as_ids=as_ids or tokenizer.is_absent),
        fingerprint=settings.fingerprint.of(serving.client.config),
        num_logprobs=num_logprobs,
        names_logprobs=bool(asked.logprob_token_ids),
        has_token_ids=tokenizer.is_absent if asked.return_token_ids is None else asked.return_token_ids,
        has_usage=has_usage,
        has_running_usage=has_usage and bool(options.continuous_usage_stats),
        has_metrics=settings.has_metrics,
    )


def check_streaming(asked: SamplingFields) -> None:
    """Refuse what does not go together with streaming, or only with it.

    Raises:
        InvalidRequestError: naming the field.
    """
    if asked.stream_options is not None and not asked.stream:
        raise InvalidRequestError("stream_options is only for requests with stream=true", "stream_options")
    if asked.prompt_logprobs is not None and asked.stream:
        raise InvalidRequestError("prompt_logprobs is not available with stream=true", "prompt_logprobs")


def new_request_id(request: Request, asked: SamplingFields) -> str:
    """Return the caller's own id (header `X-Request-Id`, then the field `request_id`) or a random one."""
    if not asked.request_id or request.header(b"x-request-id"):
        return request.request_id
    request.request_id = asked.request_id
    return asked.request_id
