"""`Transcriber`: transcribes files of any length, in windows of the length that the model reads at once.

Without timestamps, a long clip is cut where it is quiet, and its windows run concurrently. With timestamps, each window
begins after the last complete segment of the previous one; see `octavo.frontend.audio.long_form`.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial

from octavo.frontend.audio.long_form import WholeSpectrogram
from octavo.frontend.audio.prompts import AudioPrompts, AudioWindow
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
"""Windows of one file that run concurrently; a long file must leave room for other requests."""


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """A caller's request for a transcript."""

    file: bytes
    """Contents of a file, in a format of libsndfile."""
    params: SamplingParams
    """Sampling parameters of each window. Without a token limit, a window may use the decoder's full length."""
    task: str = "transcribe"
    """"transcribe" or "translate"."""
    language: str | None = None
    """Code of the spoken language. `None`: it is detected in the first window."""
    prompt: str = ""
    """Text that precedes the transcript, to guide its style and names."""
    has_timestamps: bool = False
    has_segment_logprobs: bool = False
    """Whether segments have `avg_logprob` and `no_speech_prob`."""
    has_words: bool = False
    """Whether the times of words are requested; needs `has_timestamps`."""


@dataclass(frozen=True, slots=True)
class WindowedClip:
    """A decoded audio clip, and how its windows are transcribed."""

    windows: list[AudioWindow]
    """With timestamps: only the windows that have begun."""
    duration_s: float
    language: str
    prompt_token_ids: list[int]
    """Prompt of each window."""
    params: SamplingParams
    request_id: str
    spectrogram: WholeSpectrogram | None = None
    """Windows are cut from it. `None`: there are no timestamps, and `windows` is complete."""
    words_language: str | None = None
    """Language of the text whose words are located. `None`: words are not requested."""
    rows: dict[int, list[float]] = field(default_factory=dict)
    """Rows at which tokens begin, by window index, if words are requested; see `words_of`."""
    is_accepted: bool = False
    """Whether the engine has accepted a request for this clip, which it has if it detected the language."""


class Transcriber:
    """Transcribes the audio clips of one engine.

    Raises:
        InvalidRequestError: the model does not transcribe.
    """

    def __init__(self, client: AsyncClient) -> None:
        facts = client.config.model.media
        if not isinstance(client.media, AudioPrompts) or facts is None:
            raise InvalidRequestError("the model of this engine does not transcribe audio: use Whisper", "model")
        self._client, self._prompts = client, client.media
        self._tokens = SpeechTokens.of(facts.processor_path)

    async def read(self, request: SpeechRequest, request_id: str) -> WindowedClip:
        """Decode an audio clip and prepare its windows.

        Raises:
            OctavoError: the file or a parameter is invalid, or the language could not be detected.
        """
        before = await self._before(request.prompt)
        language, max_model_len = request.language, self._client.facts.max_model_len

        def prompt_of(language: str | None) -> list[int]:
            return self._tokens.prompt(
                language, request.task, before, max_model_len, has_timestamps=request.has_timestamps
            )

        prompt_of(language)  # check the parameters before the file is decoded
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
        return WindowedClip(
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

    async def outputs(self, clip: WindowedClip, kind: OutputKind) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Yield the outputs of the windows, in order, each with the index of its window.

        Args:
            clip: not transcribed yet.
            kind: with timestamps, only complete outputs are possible.

        Raises:
            OctavoError: a window failed. The first failure or abort ends all windows.
        """
        clip = replace(clip, params=clip.params.clone(output_kind=kind))
        if clip.spectrogram is not None:
            assert kind is OutputKind.FINAL_ONLY, "the next window begins where the tokens of this one say"
            async with aclosing(self._one_after_another(clip, clip.spectrogram)) as outputs:
                async for index, output in outputs:
                    yield index, output
            return
        runs = [partial(self._run, clip, index) for index in range(len(clip.windows))]
        async with aclosing(in_order(runs, WINDOWS_AT_ONCE)) as outputs:
            async for index, output in outputs:
                yield index, output

    def segments(self, clip: WindowedClip, outputs: Sequence[RequestOutput]) -> list[Segment]:
        """Return the segments of a clip that was transcribed with timestamps.

        Args:
            clip: completely transcribed.
            outputs: the last output of each window.
        """
        decode = self._client.tokenizer.decode
        return [
            segment
            for window, output in zip(clip.windows, outputs, strict=True)
            for segment in segments_of(window, output, self._tokens, decode)
        ]

    def words(self, clip: WindowedClip, outputs: Sequence[RequestOutput]) -> list[Word]:
        """Return the words of a clip that was transcribed with words; see `segments`."""
        assert clip.words_language is not None, "words were asked for"
        decode, language = self._client.tokenizer.decode, clip.words_language
        return [
            word
            for index, (window, output) in enumerate(zip(clip.windows, outputs, strict=True))
            for word in words_of(window, self._kept(window, output), clip.rows[index], self._tokens, decode, language)
        ]

    def _kept(self, window: AudioWindow, output: RequestOutput) -> list[int]:
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
        if any(token >= self._tokens.end for token in token_ids):  # Whisper's special tokens have the largest ids
            raise InvalidRequestError("prompt: a text with special tokens, such as <|en|>, is refused", "prompt")
        return token_ids

    async def _detect(self, window: AudioWindow, request_id: str) -> str:
        """Return the most probable language of a window."""
        codes = {token: code for code, token in self._tokens.languages.items()}
        params = SamplingParams(
            temperature=0.0, max_tokens=1, allowed_token_ids=list(codes), output_kind=OutputKind.FINAL_ONLY
        )
        clip = WindowedClip([window], 0.0, "", [self._tokens.start], params, f"{request_id}-language")
        async with aclosing(self._run(clip, 0)) as outputs:
            (output,) = [output async for output in outputs]
        return codes[output.outputs[0].token_ids[0]]

    async def _one_after_another(
        self, clip: WindowedClip, spectrogram: WholeSpectrogram
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        start, windows = 0, clip.windows
        while start < spectrogram.num_frames:
            if start:
                windows.append(spectrogram.window(start))
            async with aclosing(self._run(clip, len(windows) - 1)) as outputs:
                (output,) = [output async for output in outputs]
            yield len(windows) - 1, output
            start = spectrogram.next_start(windows[-1], output.outputs[0].token_ids, self._tokens)
            windows[-1] = windows[-1].without_frames()

    async def _run(self, clip: WindowedClip, index: int) -> AsyncGenerator[RequestOutput]:
        token_ids = packed_prompt(clip.prompt_token_ids, self._client.facts.vocab_size)
        # Draining or a full queue may reject the first request of a clip, but not a later one.
        is_continued = clip.is_accepted or index > 0
        prompt = TokenizedPrompt(None, token_ids, media=(clip.windows[index].item,), is_continued=is_continued)
        request_id = f"{clip.request_id}-{index}"
        async with aclosing(self._client.generate(prompt, clip.params, request_id=request_id)) as outputs:
            async for output in outputs:
                output.outputs[0].require_whole()
                if clip.words_language is not None and output.outputs[0].finish_reason is not None:
                    clip.rows[index] = await self._aligned(clip, index, output.outputs[0].token_ids)
                yield output

    async def _aligned(self, clip: WindowedClip, index: int, token_ids: Sequence[int]) -> list[float]:
        """Return the entry of `rows` for a window whose tokens are known."""
        text = [token for token in token_ids if token != self._tokens.end]
        if not text:
            return []
        window, before = clip.windows[index], clip.prompt_token_ids
        spec = self._tokens.alignment(len(before), num_spoken_rows(window.duration_s, window.item.attended_rows))
        result = await self._client.pooler.align([*before, *text], [window.item], spec)
        rows: list[float] = result.array().tolist()
        return rows
