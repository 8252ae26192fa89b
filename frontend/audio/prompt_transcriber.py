"""`PromptTranscriber`: transcribes files with a language model that has the audio in its prompt."""

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from octavo.frontend.audio.segments import Segment
from octavo.frontend.audio.transcriber import SpeechRequest
from octavo.frontend.audio.voxtral import ARCHITECTURE, PLACEHOLDER
from octavo.frontend.audio.words import Word
from octavo.frontend.client import AsyncClient
from octavo.frontend.generation.prompt import TokenizedPrompt, packed_prompt
from octavo.frontend.media.parts import MediaSource
from octavo.frontend.media.prompts import MediaPrompts
from octavo.frontend.outputs import RequestOutput
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.params import OutputKind, SamplingParams

_MARK = "[TRANSCRIBE]"
_LANGUAGE = re.compile("[a-z]{2}")


@dataclass(frozen=True, slots=True)
class PromptClip:
    """A decoded audio clip in the prompt that requests its transcript."""

    prompt: TokenizedPrompt
    duration_s: float
    language: str
    """Language code; empty: the model detects the language."""
    params: SamplingParams
    request_id: str


class PromptTranscriber:
    """Transcribes the audio clips of one engine, with one request per clip.

    Raises:
        InvalidRequestError: the model does not transcribe.
    """

    def __init__(self, client: AsyncClient) -> None:
        facts = client.config.model.media
        is_known = facts is not None and facts.architecture == ARCHITECTURE
        if not isinstance(client.media, MediaPrompts) or not is_known:
            raise InvalidRequestError(
                "the model of this engine does not transcribe audio: use Whisper or Voxtral", "model"
            )
        if client.tokenizer.token_id(_MARK) is None:
            raise InvalidRequestError(f"the model's tokenizer has no {_MARK}: it cannot transcribe", "model")
        self._client, self._prompts = client, client.media

    async def read(self, request: SpeechRequest, request_id: str) -> PromptClip:
        """Decode an audio clip.

        Raises:
            OctavoError: the file or a parameter is invalid.
        """
        if request.task != "transcribe":
            raise InvalidRequestError("this model transcribes and does not translate: use Whisper", "model")
        if request.has_timestamps:
            raise _no_times()
        if request.prompt.strip():
            raise InvalidRequestError("prompt: this model takes none: leave it out", "prompt")
        if request.language is not None and not _LANGUAGE.fullmatch(request.language):
            raise InvalidRequestError(f"language is {request.language!r}; expected two letters, such as en", "language")
        language = f"lang:{request.language}" if request.language else ""
        text = f"[INST][BEGIN_AUDIO]{PLACEHOLDER}[/INST]{language}{_MARK}"
        made = await self._prompts.of_text(text, [MediaSource("audio", request.file, "file")], adds_special_tokens=True)
        vocab_size = self._client.facts.vocab_size
        prompt = TokenizedPrompt(None, packed_prompt(made.token_ids, vocab_size), media=made.items)
        return PromptClip(prompt, made.duration_s, request.language or "", request.params, request_id)

    async def outputs(self, clip: PromptClip, kind: OutputKind) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Yield the outputs, each with index 0, as a clip is one window; see `Transcriber.outputs`."""
        params = clip.params.clone(output_kind=kind)
        async with aclosing(self._client.generate(clip.prompt, params, request_id=clip.request_id)) as outputs:
            async for output in outputs:
                output.outputs[0].require_whole()
                yield 0, output

    def segments(self, clip: PromptClip, outputs: Sequence[RequestOutput]) -> list[Segment]:
        """Raise `InvalidRequestError`: the model draws no timestamps."""
        raise _no_times()

    def words(self, clip: PromptClip, outputs: Sequence[RequestOutput]) -> list[Word]:
        """Raise `InvalidRequestError`: the model gives no times of words."""
        raise _no_times()


def _no_times() -> InvalidRequestError:
    return InvalidRequestError("response_format: this model gives no times: use json or text", "response_format")
