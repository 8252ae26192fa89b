"""`Transcriber`: from a file of any length to its text, in windows that the model reads at once.

Without timestamps a long sound is cut where it is quiet, and its windows run at the same time. With timestamps each
window begins behind the last segment that the one before has whole: see `octavo.frontend.audio.long_form`.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial

from octavo.frontend.audio.long_form import WholeSpectrogram
from octavo.frontend.audio.prompts import AudioPrompts, SoundWindow
from octavo.frontend.audio.segments import Segment, num_kept_tokens, num_spoken_rows, segments_of
from octavo.frontend.audio.speech_tokens import SpeechTokens
from octavo.frontend.audio.windows import in_order
from octavo.frontend.audio.words import Word, words_of
from octavo.frontend.client import AsyncClient
from octavo.frontend.generation.prompt import TokenizedPrompt, packed_prompt
from octavo.frontend.media.parts import MediaSource
from octavo.frontend.outputs import RequestOutput
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.params import OutputKind, SamplingParams

WINDOWS_AT_ONCE = 8
"""Of one file: a long one must leave room for others."""


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """What a caller wants to know of a sound."""

    file: bytes
    """In a format of libsndfile."""
    params: SamplingParams
    """Of each window; without a limit of tokens, a window has room for as many as the decoder has."""
    task: str = "transcribe"
    """Or "translate"."""
    language: str | None = None
    """Code of what is spoken; None: it is detected in the first window."""
    prompt: str = ""
    """Text before the sound's, for its style and names."""
    has_timestamps: bool = False
    has_segment_logprobs: bool = False
    """Segments have `avg_logprob` and `no_speech_prob`."""
    has_words: bool = False
    """It is asked when each word is spoken; needs `has_timestamps`."""


@dataclass(frozen=True, slots=True)
class Sound:
    """A decoded sound, and how its windows are transcribed."""

    windows: list[SoundWindow]
    """With timestamps, those that have begun."""
    duration_s: float
    language: str
    prompt_token_ids: list[int]
    """Of each window."""
    params: SamplingParams
    request_id: str
    spectrogram: WholeSpectrogram | None = None
    """From which windows are cut; None: there are no timestamps, and `windows` has them all."""
    words_language: str | None = None
    """Of the text whose words are found; None: the caller does not ask for them."""
    rows: dict[int, list[float]] = field(default_factory=dict)
    """By window, if there are words: see `words_of`."""
    is_accepted: bool = False
    """Whether the engine has taken a request for it, as it has where it detected the language."""


class Transcriber:
    """Transcribes the sounds of one engine.

    Raises:
        InvalidRequestError: the model does not transcribe.
    """

    def __init__(self, client: AsyncClient) -> None:
        facts = client.config.model.media
        if not isinstance(client.media, AudioPrompts) or facts is None:
            raise InvalidRequestError("the model of this engine does not transcribe audio: use Whisper", "model")
        self._client, self._prompts = client, client.media
        self._tokens = SpeechTokens.of(facts.processor_path)

    async def read(self, request: SpeechRequest, request_id: str) -> Sound:
        """Return a sound whose windows can be transcribed.

        Raises:
            OctavoError: the file or a parameter is invalid, or the language could not be detected.
        """
        before = await self._before(request.prompt)
        language, max_model_len = request.language, self._client.facts.max_model_len

        def prompt_of(language: str | None) -> list[int]:
            return self._tokens.prompt(
                language, request.task, before, max_model_len, has_timestamps=request.has_timestamps
            )

        prompt_of(language)  # before the file is decoded
        if request.has_words:
            self._tokens.alignment(1, 1)
            self._require_aligner()
        source = MediaSource("audio", request.file, "file")
        found = await self._prompts.read(source, is_whole=request.has_timestamps)
        windows, spectrogram = found.windows, None
        if request.has_timestamps:
            spectrogram = WholeSpectrogram.of(found)
            windows = [spectrogram.window(0)]
        is_detected = language is None and bool(self._tokens.languages)
        if is_detected:
            language = await self._detect(windows[0], request_id)
        asked = prompt_of(language)
        params = request.params.clone(speech_rules="timestamps" if request.has_timestamps else "text")
        if request.has_segment_logprobs:
            self._require_raw_logprobs()
            params = params.clone(**self._tokens.no_speech_params(asked))
        language = language or "en"
        words_language = None if not request.has_words else "en" if request.task == "translate" else language
        return Sound(
            windows,
            found.duration_s,
            language,
            asked,
            params,
            request_id,
            spectrogram,
            words_language,
            is_accepted=is_detected,
        )

    async def outputs(self, sound: Sound, kind: OutputKind) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Yield the outputs of the windows, with the index of the window and in their order.

        Args:
            sound: not transcribed yet.
            kind: with timestamps, only whole outputs.

        Raises:
            OctavoError: why there is no text. The first failure ends all windows, and so does the first abort.
        """
        sound = replace(sound, params=sound.params.clone(output_kind=kind))
        if sound.spectrogram is not None:
            assert kind is OutputKind.FINAL_ONLY, "the next window begins where the tokens of this one say"
            async with aclosing(self._one_after_another(sound, sound.spectrogram)) as outputs:
                async for index, output in outputs:
                    yield index, output
            return
        runs = [partial(self._run, sound, index) for index in range(len(sound.windows))]
        async with aclosing(in_order(runs, WINDOWS_AT_ONCE)) as outputs:
            async for index, output in outputs:
                yield index, output

    def segments(self, sound: Sound, outputs: Sequence[RequestOutput]) -> list[Segment]:
        """Return the segments of a sound that was transcribed with timestamps.

        Args:
            sound: whole.
            outputs: the last one of each window.
        """
        decode = self._client.tokenizer.decode
        return [
            segment
            for window, output in zip(sound.windows, outputs, strict=True)
            for segment in segments_of(window, output, self._tokens, decode)
        ]

    def words(self, sound: Sound, outputs: Sequence[RequestOutput]) -> list[Word]:
        """Return the words of a sound that was transcribed with words: see `segments`."""
        assert sound.words_language is not None, "words were asked for"
        decode, language = self._client.tokenizer.decode, sound.words_language
        return [
            word
            for index, (window, output) in enumerate(zip(sound.windows, outputs, strict=True))
            for word in words_of(window, self._kept(window, output), sound.rows[index], self._tokens, decode, language)
        ]

    def _kept(self, window: SoundWindow, output: RequestOutput) -> list[int]:
        token_ids = output.outputs[0].token_ids
        return token_ids[: num_kept_tokens(token_ids, self._tokens, window.item.attended_rows)]

    def _require_raw_logprobs(self) -> None:
        if self._client.config.logprobs_mode != "raw_logprobs":
            raise InvalidRequestError(
                "response_format verbose_json needs an engine with --logprobs-mode raw_logprobs: use srt or vtt",
                "response_format",
            )

    def _require_aligner(self) -> None:
        media = self._client.config.media
        if media is None or not media.aligned_layers:
            raise InvalidRequestError(
                "timestamp_granularities[]: an engine on a GPU does not compute the times of words: use segment, or an "
                "engine with --device cpu",
                "timestamp_granularities[]",
            )

    async def _before(self, prompt: str) -> list[int]:
        """Return the tokens of the caller's prompt."""
        if not prompt.strip():
            return []
        token_ids = await self._client.tokenize(f" {prompt.strip()}", add_special_tokens=False)
        if any(token >= self._tokens.end for token in token_ids):  # Whisper's special tokens come behind all others
            raise InvalidRequestError("prompt: a text with special tokens, such as <|en|>, is refused", "prompt")
        return token_ids

    async def _detect(self, window: SoundWindow, request_id: str) -> str:
        """Return the likeliest language of a window."""
        codes = {token: code for code, token in self._tokens.languages.items()}
        params = SamplingParams(
            temperature=0.0, max_tokens=1, allowed_token_ids=list(codes), output_kind=OutputKind.FINAL_ONLY
        )
        sound = Sound([window], 0.0, "", [self._tokens.start], params, f"{request_id}-language")
        async with aclosing(self._run(sound, 0)) as outputs:
            (output,) = [output async for output in outputs]
        return codes[output.outputs[0].token_ids[0]]

    async def _one_after_another(
        self, sound: Sound, spectrogram: WholeSpectrogram
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        start, windows = 0, sound.windows
        while start < spectrogram.num_frames:
            if start:
                windows.append(spectrogram.window(start))
            async with aclosing(self._run(sound, len(windows) - 1)) as outputs:
                (output,) = [output async for output in outputs]
            yield len(windows) - 1, output
            start = spectrogram.next_start(windows[-1], output.outputs[0].token_ids, self._tokens)
            windows[-1] = windows[-1].without_frames()

    async def _run(self, sound: Sound, index: int) -> AsyncGenerator[RequestOutput]:
        token_ids = packed_prompt(sound.prompt_token_ids, self._client.facts.vocab_size)
        # A drain or a full queue refuses a sound at its first request, and not in its middle.
        is_continued = sound.is_accepted or index > 0
        prompt = TokenizedPrompt(None, token_ids, media=(sound.windows[index].item,), is_continued=is_continued)
        request_id = f"{sound.request_id}-{index}"
        async with aclosing(self._client.generate(prompt, sound.params, request_id=request_id)) as outputs:
            async for output in outputs:
                output.outputs[0].require_whole()
                if sound.words_language is not None and output.outputs[0].finish_reason is not None:
                    sound.rows[index] = await self._aligned(sound, index, output.outputs[0].token_ids)
                yield output

    async def _aligned(self, sound: Sound, index: int, token_ids: Sequence[int]) -> list[float]:
        """Return `rows` of a window whose tokens are known."""
        text = [token for token in token_ids if token != self._tokens.end]
        if not text:
            return []
        window, before = sound.windows[index], sound.prompt_token_ids
        spec = self._tokens.alignment(len(before), num_spoken_rows(window.duration_s, window.item.attended_rows))
        result = await self._client.pooler.align([*before, *text], [window.item], spec)
        rows: list[float] = result.array().tolist()
        return rows
