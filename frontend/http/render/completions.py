"""Renders the client's outputs as plain completions, unary and in chunks. No IO."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from octavo.frontend.http.render.answer import AnswerStyle
from octavo.frontend.http.render.frame import MARK, TextFrame
from octavo.frontend.http.render.logprobs import TextPlace, completion_logprobs, join_logprobs, prompt_logprobs
from octavo.frontend.http.render.usage import UsageCount
from octavo.frontend.http.schemas.completions import CompletionChoice, CompletionLogprobs, CompletionResponse
from octavo.frontend.http.schemas.usage import Usage
from octavo.frontend.outputs import CompletionOutput, PositionLogprobs, RequestOutput

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class EchoStyle:
    """The prompts, for choices that echo them."""

    prompts: list[str]
    """Text of each prompt."""
    shows_completion: bool = True
    """False if `max_tokens` is 0: the one token that the engine had to generate is not shown."""


class CompletionAnswer:
    """One response to one or several prompts. Choice i of prompt p has the index p * n + i.

    Args:
        style: the style of the response.
        n: number of choices per prompt.
        echo: None: choices do not repeat their prompts.
        shows_prompt_logprobs: whether the client requested logprobs by the name `prompt_logprobs`.
    """

    def __init__(
        self, style: AnswerStyle, n: int, echo: EchoStyle | None = None, *, shows_prompt_logprobs: bool = False
    ) -> None:
        self._style = style
        self._n = n
        self._echo = echo
        self._shows_prompt_logprobs = shows_prompt_logprobs
        self._usage = UsageCount(by_choice=style.has_running_usage)
        is_short = style.num_logprobs is None and not (style.shows_tokens or style.has_running_usage)
        self._is_plain = is_short and echo is None and not shows_prompt_logprobs
        self._frames: dict[int, TextFrame] = {}
        """The frame of each choice whose chunks contain only text."""
        self._places: dict[int, TextPlace] = {}
        """Position in the text up to which logprobs were sent, for each choice that has begun."""
        self._prompt_logprobs: dict[int, list[PositionLogprobs | None]] = {}
        """Prompt logprobs from the first output of each prompt: later choices of a stream need them too."""

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the complete response as JSON.

        Args:
            outputs: one finished output per prompt, with all generated tokens.
        """
        choices = []
        for prompt_index, output in enumerate(outputs):
            self._note(output, prompt_index)
            choices += [self._choice(output, choice, prompt_index) for choice in output.outputs]
        for choice in choices:
            if choice.prompt_token_ids is UNSET:
                choice.prompt_token_ids = None
            if choice.prompt_logprobs is UNSET:
                choice.prompt_logprobs = None
        response = self._response(choices, self._usage.total())
        response.system_fingerprint = self._style.fingerprint
        if len(outputs) == 1 and outputs[0].kv_transfer_params is not None:
            response.kv_transfer_params = outputs[0].kv_transfer_params
        return self._last(response)

    def render(self, output: RequestOutput, prompt_index: int) -> list[bytes]:
        """Return the chunks for a delta, as JSON: one per choice that has something new."""
        self._note(output, prompt_index)
        chunks = []
        for choice in output.outputs:
            if self._is_plain and choice.text and choice.finish_reason is None:
                chunks.append(self._text_chunk(prompt_index * self._n + choice.index, choice.text))
                continue
            is_first = prompt_index * self._n + choice.index not in self._places
            rendered = self._choice(output, choice, prompt_index)
            is_news = rendered.text or rendered.finish_reason is not None or (is_first and self._style.shows_tokens)
            if is_news or (choice.token_ids and (rendered.logprobs is not None or self._style.shows_tokens)):
                usage = self._running_usage(choice.index, prompt_index)
                chunks.append(_encode(self._response([rendered], usage)))
        return chunks

    def last(self) -> list[bytes]:
        """Return the chunk that follows the end of the last choice: usage and receipt, if requested."""
        if not (self._style.has_usage or self._style.has_receipt):
            return []
        return [self._last(self._response([], self._usage.total() if self._style.has_usage else UNSET))]

    def _last(self, response: CompletionResponse) -> bytes:
        """Encode the chunk that concerns the whole request."""
        if self._style.has_metrics:
            response.metrics = self._usage.metrics()
        response.receipt = self._style.receipt
        return _encode(response)

    def _text_chunk(self, index: int, text: str) -> bytes:
        """Return a chunk that contains only text."""
        frame = self._frames.get(index)
        if frame is None:
            usage = None if self._style.has_usage else UNSET  # a chunk of plain text has no running usage
            marked = self._response([CompletionChoice(index=index, text=MARK)], usage)
            frame = self._frames[index] = TextFrame(_encode(marked))
        return frame.wrap(text)

    def _note(self, output: RequestOutput, prompt_index: int) -> None:
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs
        if self._echo is None or self._echo.shows_completion:
            self._usage.add(output, prompt_index)
        else:
            self._usage.add(_without_completion(output), prompt_index)

    def _choice(self, output: RequestOutput, choice: CompletionOutput, prompt_index: int) -> CompletionChoice:
        index = prompt_index * self._n + choice.index
        is_first = index not in self._places
        shows_completion = self._echo is None or self._echo.shows_completion
        text = choice.text if shows_completion else ""
        if self._echo is not None and is_first:
            text = self._echo.prompts[prompt_index] + text
        rendered = CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(output, choice, prompt_index, shows_completion=shows_completion),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            weight_versions=self._style.weight_versions(choice) if shows_completion else UNSET,
        )
        if self._style.has_token_ids:
            rendered.token_ids = choice.token_ids if shows_completion else []
            if is_first:
                rendered.prompt_token_ids = output.prompt_token_ids
        if self._shows_prompt_logprobs and output.prompt_logprobs is not None:
            rendered.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        return rendered

    def _logprobs(
        self, output: RequestOutput, choice: CompletionOutput, prompt_index: int, *, shows_completion: bool
    ) -> CompletionLogprobs | None:
        index = prompt_index * self._n + choice.index
        is_first = index not in self._places
        echoed = 0 if self._echo is None else len(self._echo.prompts[prompt_index])
        place = self._places.setdefault(index, TextPlace(echoed))
        if self._style.num_logprobs is None:
            return None
        result = CompletionLogprobs([], [], [], [])
        prompt = self._prompt_logprobs.get(prompt_index)
        if self._echo is not None and is_first and prompt is not None:
            text = self._echo.prompts[prompt_index]
            result = completion_logprobs(output.prompt_token_ids, prompt, self._style.names, TextPlace(0), text)
        if shows_completion and choice.logprobs:
            own = completion_logprobs(choice.token_ids, choice.logprobs, self._style.names, place)
            result = join_logprobs(result, own)
        return result

    def _running_usage(self, choice_index: int, prompt_index: int) -> Usage | UnsetType | None:
        if not self._style.has_usage:
            return UNSET
        return self._usage.so_far(choice_index, prompt_index) if self._style.has_running_usage else None

    def _response(
        self,
        choices: list[CompletionChoice],
        usage: Usage | UnsetType | None,
    ) -> CompletionResponse:
        return CompletionResponse(
            id=self._style.id,
            created=self._style.created,
            model=self._style.model,
            choices=choices,
            usage=usage,
            system_fingerprint=self._style.fingerprint or UNSET,
        )


def _without_completion(output: RequestOutput) -> RequestOutput:
    return RequestOutput(
        output.request_id,
        output.prompt,
        output.prompt_token_ids,
        [],
        output.finished,
        num_cached_tokens=output.num_cached_tokens,
    )
