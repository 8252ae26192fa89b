"""Renders the client's outputs as chat completions, unary and in chunks. No IO."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from octavo.frontend.conversation.output_parser import OutputStream
from octavo.frontend.conversation.prepare import AnswerRendering
from octavo.frontend.http.render.answer import AnswerStyle
from octavo.frontend.http.render.chat_message import TOOL_CALLS, chat_deltas, chat_message
from octavo.frontend.http.render.frame import MARK, TextFrame
from octavo.frontend.http.render.logprobs import chat_logprobs, prompt_logprobs
from octavo.frontend.http.render.usage import UsageCount
from octavo.frontend.http.schemas.chat import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
)
from octavo.frontend.http.schemas.usage import Usage
from octavo.frontend.outputs import CompletionOutput, RequestOutput

_encode = msgspec.json.Encoder().encode


def render_chat(output: RequestOutput, style: AnswerStyle) -> bytes:
    """Return the complete response as JSON.

    Args:
        output: finished, with all generated tokens.
        style: the style of the response.
    """
    completion = _completion([output], [style.chat], style)
    completion.prompt_token_ids = output.prompt_token_ids if style.has_token_ids else UNSET
    completion.prompt_logprobs = None if output.prompt_logprobs is None else prompt_logprobs(output.prompt_logprobs)
    completion.kv_transfer_params = UNSET if output.kv_transfer_params is None else output.kv_transfer_params
    return _encode(completion)


def render_chat_batch(
    outputs: Sequence[RequestOutput], renderings: Sequence[AnswerRendering], style: AnswerStyle
) -> bytes:
    """Return the responses to several conversations as JSON, each as the choice with its index.

    Args:
        outputs: one finished output per conversation, with one sequence each.
        renderings: how each output becomes a message.
        style: the style of the response.
    """
    completion = _completion(outputs, renderings, style)
    for index, choice in enumerate(completion.choices):
        choice.index = index
    return _encode(completion)


def _completion(
    outputs: Sequence[RequestOutput], renderings: Sequence[AnswerRendering], style: AnswerStyle
) -> ChatCompletion:
    usage = UsageCount()
    choices = []
    for index, (output, rendering) in enumerate(zip(outputs, renderings, strict=True)):
        usage.add(output, index)
        for choice in output.outputs:
            if rendering.parser is not None:
                usage.add_reasoning(rendering.parser.num_reasoning_tokens(choice.token_ids))
            choices.append(_whole_choice(choice, rendering, style))
    return ChatCompletion(
        id=style.id,
        created=style.created,
        model=style.model,
        choices=choices,
        usage=usage.total(),
        system_fingerprint=style.fingerprint,
        metrics=usage.metrics() if style.has_metrics else UNSET,
        receipt=style.receipt,
    )


class ChatChunks:
    """Renders the chunks of one streamed response.

    Every choice opens with a chunk that has a role and no text. Its last chunk has the finish reason and an empty
    delta. If all chunks have the usage so far, the finish reason comes with the last delta instead, as in vLLM: no
    chunk repeats a count.

    Args:
        style: the style of the response.
        n: number of choices.
    """

    def __init__(self, style: AnswerStyle, n: int) -> None:
        self._style = style
        self._n = n
        self._usage = UsageCount(by_choice=style.has_running_usage)
        self._has_begun = False
        self._is_plain = style.num_logprobs is None and not (style.shows_tokens or style.has_running_usage)
        self._frames: dict[int, TextFrame] = {}
        """The frame of each choice whose chunks contain only text."""
        parser = style.chat.parser
        self._outputs = [] if parser is None else [parser.stream() for _ in range(n)]
        """Parser of each choice; empty if all text is content."""

    def render(self, output: RequestOutput, prompt_index: int = 0) -> list[bytes]:
        """Return the chunks for a delta, as JSON. A conversation has only one prompt."""
        self._usage.add(output)
        chunks = [] if self._has_begun else self._opening(output)
        self._has_begun = True
        for choice in output.outputs:
            if self._outputs:
                rendered = self._parsed(choice, self._outputs[choice.index])
            elif choice.text and self._is_plain:
                chunks.append(self._text_chunk(choice))
                rendered = []
            else:
                has_news = choice.text or self._shows_tokens(choice)
                rendered = [self._fresh(choice, Delta(content=choice.text))] if has_news else []
            if choice.finish_reason is not None:
                self._close(choice, rendered)
            chunks += [self._chunk(one) for one in rendered]
        return chunks

    def last(self) -> list[bytes]:
        """Return the chunk that follows the end of the last choice: usage and receipt, if requested."""
        if not (self._style.has_usage or self._style.has_receipt):
            return []
        chunk = self._with_choices([], self._usage.total() if self._style.has_usage else UNSET)
        if self._style.has_usage and self._style.has_metrics:
            chunk.metrics = self._usage.metrics()
        chunk.receipt = self._style.receipt
        return [_encode(chunk)]

    def _opening(self, output: RequestOutput) -> list[bytes]:
        chunks = []
        prompt_token_ids = output.prompt_token_ids if self._style.has_token_ids else UNSET
        for index in range(self._n):
            choice = ChunkChoice(index=index, delta=Delta(role=self._style.chat.role, content=""))
            chunks.append(self._chunk(choice, prompt_token_ids, is_opening=True))
        if self._style.chat.echo:
            echo = Delta(content=self._style.chat.echo)
            echoed = [ChunkChoice(index=index, delta=echo) for index in range(self._n)]
            chunks += [self._chunk(choice, is_opening=True) for choice in echoed]
        return chunks

    def _text_chunk(self, choice: CompletionOutput) -> bytes:
        """Return a chunk that contains only text."""
        frame = self._frames.get(choice.index)
        if frame is None:
            marked = ChunkChoice(index=choice.index, delta=Delta(content=MARK))
            frame = self._frames[choice.index] = TextFrame(self._chunk(marked))
        return frame.wrap(choice.text)

    def _parsed(self, choice: CompletionOutput, parser: OutputStream) -> list[ChunkChoice]:
        """Return the new parts of a choice whose text is not only content; the first part has the tokens."""
        deltas = list(chat_deltas(parser.push(choice)))
        first = deltas[:1] or ([Delta()] if self._shows_tokens(choice) else [])
        rest = [ChunkChoice(index=choice.index, delta=delta) for delta in deltas[1:]]
        return [self._fresh(choice, delta) for delta in first] + rest

    def _close(self, choice: CompletionOutput, rendered: list[ChunkChoice]) -> None:
        """Add the end of a choice to its last chunks."""
        reason = choice.finish_reason
        if self._outputs:
            parser = self._outputs[choice.index]
            self._usage.add_reasoning(parser.num_reasoning_tokens())
            reason = TOOL_CALLS if parser.ends_in_calls(reason) else reason
        if not (rendered and self._style.has_running_usage):
            rendered.append(ChunkChoice(index=choice.index, delta=Delta()))
        rendered[-1].finish_reason = reason
        rendered[-1].stop_reason = choice.stop_reason

    def _shows_tokens(self, choice: CompletionOutput) -> bool:
        """Return whether there are tokens to show, with or without text."""
        return bool(choice.token_ids) and (choice.logprobs is not None or self._style.shows_tokens)

    def _fresh(self, choice: CompletionOutput, delta: Delta) -> ChunkChoice:
        return ChunkChoice(
            index=choice.index,
            delta=delta,
            logprobs=_logprobs(choice, self._style),
            token_ids=choice.token_ids if self._style.has_token_ids else UNSET,
            weight_versions=self._style.weight_versions(choice),
        )

    def _chunk(
        self, choice: ChunkChoice, prompt_token_ids: list[int] | UnsetType = UNSET, *, is_opening: bool = False
    ) -> bytes:
        usage: Usage | UnsetType | None = UNSET
        if self._style.has_running_usage:
            usage = self._usage.at_start() if is_opening else self._usage.so_far(choice.index)
        elif self._style.has_usage:
            usage = None
        chunk = self._with_choices([choice], usage)
        chunk.prompt_token_ids = prompt_token_ids
        return _encode(chunk)

    def _with_choices(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        style = self._style
        return ChatChunk(
            id=style.id,
            created=style.created,
            model=style.model,
            choices=choices,
            usage=usage,
            system_fingerprint=style.fingerprint or UNSET,
        )


def _whole_choice(choice: CompletionOutput, rendering: AnswerRendering, style: AnswerStyle) -> ChatChoice:
    message, parser = chat_message(choice.text, rendering), rendering.parser
    is_calling = parser is not None and parser.ends_in_calls(choice.finish_reason, len(message.tool_calls or ()))
    return ChatChoice(
        index=choice.index,
        message=message,
        logprobs=_logprobs(choice, style),
        finish_reason=TOOL_CALLS if is_calling else choice.finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=choice.token_ids if style.has_token_ids else UNSET,
        weight_versions=style.weight_versions(choice),
    )


def _logprobs(choice: CompletionOutput, style: AnswerStyle) -> ChatLogprobs | None:
    if style.num_logprobs is None or choice.logprobs is None:
        return None
    num_top = None if style.names_logprobs else style.num_logprobs
    return chat_logprobs(choice.token_ids, choice.logprobs, style.names, num_top)
