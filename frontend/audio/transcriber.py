"""`Transcriber`: from a file of any length to its text, in windows that the model reads at once."""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

from octavo.frontend.audio.prompts import AudioPrompts
from octavo.frontend.audio.speech_tokens import SpeechTokens
from octavo.frontend.audio.wire import Window
from octavo.frontend.client import AsyncClient
from octavo.frontend.generation.prompt import TokenizedPrompt, packed_prompt
from octavo.frontend.media.parts import MediaSource
from octavo.frontend.outputs import CompletionOutput
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.params import OutputKind, SamplingParams

WINDOWS_AT_ONCE = 8
"""Of one file: a long one must leave room for others."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """The text of a sound."""

    text: str
    language: str
    duration_s: float


class Transcriber:
    """Transcribes sounds for one request.

    Args:
        client: of an engine whose model transcribes.
        task: "transcribe" or "translate".

    Raises:
        InvalidRequestError: the model does not transcribe.
    """

    def __init__(self, client: AsyncClient, task: str) -> None:
        facts = client.config.model.media
        if not isinstance(client.media, AudioPrompts) or facts is None:
            raise InvalidRequestError("the model of this engine does not transcribe audio: use Whisper", "model")
        self._client, self._task = client, task
        self._prompts, self._tokens = client.media, SpeechTokens.of(facts.processor_path)

    async def transcribe(
        self, file: bytes, params: SamplingParams, *, language: str | None, prompt: str, request_id: str
    ) -> Transcript:
        """Return the text of a file. A long one is cut where it is quiet, and some windows run at the same time.

        Args:
            file: in a format of libsndfile.
            params: of each window; without a limit of tokens, a window has room for as many as the decoder has.
            language: code of what is spoken; None: it is detected in the first window.
            prompt: text before the sound's, for its style and names.
            request_id: of the request.

        Raises:
            OctavoError: why there is no text. The first failure ends all windows.
        """
        before = await self._before(prompt)
        max_model_len = self._client.facts.max_model_len
        self._tokens.prompt(language, self._task, before, max_model_len)  # before the file is decoded
        sound = await self._prompts.read(MediaSource(file, "file"))
        if language is None and self._tokens.languages:
            language = await self._detect(sound.windows[0], request_id)
        asked = self._tokens.prompt(language, self._task, before, max_model_len)
        params = params.clone(speech_rules="text")
        places = asyncio.Semaphore(WINDOWS_AT_ONCE)

        async def run(index: int, window: Window) -> CompletionOutput:
            async with places:
                return await self._run(asked, window, params, f"{request_id}-{index}")

        windows = [asyncio.create_task(run(index, window)) for index, window in enumerate(sound.windows)]
        try:
            outputs = await asyncio.gather(*windows)
        finally:
            for window in windows:
                window.cancel()
            await asyncio.gather(*windows, return_exceptions=True)
        texts = [output.text.strip() for output in outputs]
        return Transcript(" ".join(filter(None, texts)), language or "en", sound.duration_s)

    async def _before(self, prompt: str) -> list[int]:
        """Return the tokens of the caller's prompt."""
        if not prompt.strip():
            return []
        token_ids = await self._client.tokenize(f" {prompt.strip()}", add_special_tokens=False)
        if any(token >= self._tokens.end for token in token_ids):  # Whisper's special tokens come behind all others
            raise InvalidRequestError("prompt: a text with special tokens, such as <|en|>, is refused", "prompt")
        return token_ids

    async def _detect(self, window: Window, request_id: str) -> str:
        """Return the likeliest language of a window."""
        codes = {token: code for code, token in self._tokens.languages.items()}
        params = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=list(codes))
        output = await self._run([self._tokens.start], window, params, f"{request_id}-language")
        return codes[output.token_ids[0]]

    async def _run(self, asked: list[int], window: Window, params: SamplingParams, request_id: str) -> CompletionOutput:
        made = self._prompts.of_window(asked, window)
        prompt = TokenizedPrompt(None, packed_prompt(made.token_ids, self._client.facts.vocab_size), media=made.items)
        whole = params.clone(output_kind=OutputKind.FINAL_ONLY)
        async with aclosing(self._client.generate(prompt, whole, request_id=request_id)) as outputs:
            return [output async for output in outputs][-1].outputs[0]
