"""Parts of transcriptions: windows in order, joined text, segments, subtitles, and the fields of the form."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np
import pytest
import transformers

from octavo.frontend.audio.long_form import WholeSpectrogram
from octavo.frontend.audio.prompts import AudioWindow, DecodedAudio
from octavo.frontend.audio.segments import Segment, num_kept_tokens, segments_of
from octavo.frontend.audio.spectrogram import Spectrogram
from octavo.frontend.audio.speech_tokens import SpeechTokens
from octavo.frontend.audio.subtitles import subrip, webvtt
from octavo.frontend.audio.text import JoinedText
from octavo.frontend.audio.windows import in_order
from octavo.frontend.http.audio_form import AudioForm
from octavo.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.protocol.buffers import Buffer
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.media import MediaItem, MediaTensor, digest_of

TOKENS = SpeechTokens(10, 9, 14, 13, {"en": 11}, {"transcribe": 12}, (), no_speech=13)
FIRST = TOKENS.first_timestamp
ENGLISH = SpeechTokens(10, 9, 14, None, {}, {}, (), no_speech=13)


class Runs:
    """Runs whose outputs come when the test says so."""

    def __init__(self, count: int) -> None:
        self.places = [asyncio.Queue[str | Exception | None]() for _ in range(count)]
        self.closed: list[int] = []

    async def _run(self, index: int) -> AsyncGenerator[str]:
        try:
            while (output := await self.places[index].get()) is not None:
                if isinstance(output, Exception):
                    raise output
                yield output
        finally:
            self.closed.append(index)

    @property
    def starts(self) -> list[Callable[[], AsyncGenerator[str]]]:
        return [partial(self._run, index) for index in range(len(self.places))]


def test_outputs_of_windows_come_in_order_and_the_first_ones_at_once() -> None:
    async def main() -> None:
        runs = Runs(3)
        async with aclosing(in_order(runs.starts, 2)) as outputs:
            for index, output in ((1, "c"), (1, None), (0, "a")):
                runs.places[index].put_nowait(output)
            assert await anext(outputs) == (0, "a")
            for index, output in ((2, "d"), (2, None), (0, "b"), (0, None)):
                runs.places[index].put_nowait(output)
            assert [one async for one in outputs] == [(0, "b"), (1, "c"), (2, "d")]
        assert sorted(runs.closed) == [0, 1, 2]

    asyncio.run(main())


def test_the_failure_of_a_later_window_ends_all_at_once() -> None:
    async def main() -> None:
        runs = Runs(3)
        outputs = in_order(runs.starts, 2)
        runs.places[1].put_nowait(InvalidRequestError("it fails", "file"))
        with pytest.raises(InvalidRequestError, match="it fails"):
            await anext(outputs)  # the first window never gives anything
        assert sorted(runs.closed) in ([0, 1], [0, 1, 2])

    asyncio.run(main())


def test_closing_ends_all_windows() -> None:
    async def main() -> None:
        runs = Runs(2)
        outputs = in_order(runs.starts, 2)
        runs.places[0].put_nowait("a")
        assert await anext(outputs) == (0, "a")
        await outputs.aclose()
        assert sorted(runs.closed) == [0, 1]

    asyncio.run(main())


def test_pieces_make_the_text_of_whole_windows() -> None:
    windows = [[" One", " two", ".", " "], ["", " "], [" <|0.50|>", "three  ", "four"], ["<|1.00|> five", "\n"]]
    joined = JoinedText()
    shown = [joined.add(index, piece) for index, pieces in enumerate(windows) for piece in pieces]
    assert "".join(shown) == "One two. three  four five"
    assert shown[:4] == ["One", " two", ".", ""]


def output_of(tokens: list[int], no_speech: float | None = -2.0) -> RequestOutput:
    logprobs = [{token: Logprob(-0.1 * place), 13: Logprob(-3.0)} for place, token in enumerate(tokens, 1)]
    rows = None if no_speech is None else [[no_speech], [-math.inf]]
    one = CompletionOutput(0, "", tokens, logprobs=logprobs, finish_reason="stop")
    return RequestOutput("a", None, [10, 11, 12], [one], finished=True, prompt_token_id_logprobs=rows)


def segments(tokens: list[int], duration_s: float = 5.0, no_speech: float | None = -2.0) -> list[Segment]:
    window = AudioWindow(30.0, duration_s, MediaItem([], b"", {}))
    return list(segments_of(window, output_of(tokens, no_speech), TOKENS, lambda ids: "".join(f" w{i}" for i in ids)))


def test_segments_are_between_timestamps() -> None:
    first, second = segments([FIRST, 1, 2, FIRST + 50, FIRST + 60, 3, FIRST + 100, 9])
    assert (first.start_s, first.end_s, first.text, first.token_ids) == (
        30.0,
        31.0,
        " w1 w2",
        [FIRST, 1, 2, FIRST + 50],
    )
    assert (second.start_s, second.end_s, second.token_ids) == (31.2, 32.0, [FIRST + 60, 3, FIRST + 100])
    assert first.avg_logprob == pytest.approx(-0.25) and second.avg_logprob == pytest.approx(-0.6)
    assert first.no_speech_prob == second.no_speech_prob == pytest.approx(math.exp(-2)) and first.seek == 3000
    (english,) = segments([FIRST, 1, 9], no_speech=None)
    assert english.no_speech_prob == pytest.approx(math.exp(-3)), "after the only token of the prompt"


def test_a_window_keeps_the_segments_that_it_has_whole() -> None:
    one = [FIRST, 1, 2, FIRST + 60]
    for tokens, num_kept in (
        ([*one, 9], 5),  # no speech behind the single timestamp
        ([*one, FIRST + 60, 9], 4),
        ([*one, FIRST + 70, 3, 4, 9], 4),  # the second segment goes on behind the window
        ([*one, FIRST + 70, 3, FIRST + 90, 9], 8),
        ([FIRST, 1, FIRST + 49, FIRST + 49, 2, 9], 6),  # too early
        ([FIRST, 1, 2], 3),
        ([9], 1),
    ):
        assert num_kept_tokens(tokens, TOKENS, 1500) == num_kept, tokens
    assert [one.text for one in segments([*one, FIRST + 70, 3, 4, 9])] == [" w1 w2"]


@pytest.mark.parametrize("num_samples", [8_000, 39_999])
def test_windows_of_a_whole_spectrogram(num_samples: int) -> None:
    extractor = transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=1)
    samples = np.random.default_rng(0).normal(size=num_samples).astype(np.float32)
    frames = Spectrogram(extractor)(samples)
    if num_samples > 16_000:
        whole = extractor(samples, sampling_rate=16_000, truncation=False, padding="longest", return_tensors="np")
        np.testing.assert_allclose(frames, whole["input_features"][0], atol=2e-5)
    tensor = MediaTensor("float32", list(frames.shape), Buffer(frames.tobytes()))
    item = MediaItem([], b"", {"input_features": tensor}, attended_rows=50, kind="audio")
    clip = WholeSpectrogram.of(DecodedAudio(num_samples / 16_000, [AudioWindow(0.0, num_samples / 16_000, item)]))
    assert clip.num_frames == num_samples // 160
    for start in range(0, clip.num_frames, 46):
        window = clip.window(start)
        data = window.item.tensors["input_features"]
        found = np.frombuffer(data.data.data, np.float32).reshape(data.shape)
        expected = frames[:, start : start + 100]
        assert np.array_equal(found, np.pad(expected, ((0, 0), (0, 100 - expected.shape[1]))))
        assert window.start_s == start / 100 and window.duration_s == min(100, clip.num_frames - start) / 100
        assert window.item.digest == digest_of(window.item.tensors)
    assert clip.next_start(clip.window(0), [FIRST, 1, FIRST + 20, FIRST + 20, 2, 9], TOKENS) == 40
    for tokens, start in (
        ([FIRST, 1, FIRST + 20, 9], 100),
        ([FIRST, 1, FIRST + 20], 40),  # its limit of tokens has ended it, and speech may go on
        ([FIRST, 1, FIRST + 10, FIRST + 10, 2, FIRST + 20], 40),
        ([FIRST, 1, FIRST + 10, FIRST + 20], 20),
        ([FIRST], 100),  # windows advance
        ([FIRST, 1, 2], 100),
        ([9], 100),
        ([], 100),
    ):
        assert clip.next_start(clip.window(0), tokens, TOKENS) == min(start, clip.num_frames), tokens


def test_segments_that_have_no_end_or_are_longer_than_their_window() -> None:
    assert [(one.start_s, one.end_s) for one in segments([FIRST + 20, 1, 2], 2.0)] == [(30.4, 32.0)]
    assert [(one.start_s, one.end_s) for one in segments([FIRST, 1, FIRST + 900, 9], 2.0)] == [(30.0, 32.0)]
    assert [one.start_s for one in segments([FIRST, 1, FIRST + 50, 2, 9])] == [30.0, 31.0], "no second timestamp"
    assert segments([FIRST, FIRST + 900, 9]) == segments([9]) == []


def test_subtitles() -> None:
    text = " Is 1 < 2 --> yes & no?"
    shown = [Segment(0.0, 1.5, " One.", [], 0, 0, 0, 0), Segment(3661.25, 3662.0, text, [], 0, 0, 0, 0)]
    assert subrip(shown) == (
        "1\n00:00:00,000 --> 00:00:01,500\nOne.\n\n2\n01:01:01,250 --> 01:01:02,000\nIs 1 < 2 --> yes & no?\n\n"
    )
    assert webvtt(shown) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne.\n\n"
        "01:01:01.250 --> 01:01:02.000\nIs 1 &lt; 2 --&gt; yes &amp; no?\n\n"
    )


def test_where_the_probability_of_no_speech_is_read() -> None:
    assert ENGLISH.no_speech_params([10]) == {"logprob_token_ids": [13]}
    assert TOKENS.no_speech_params([13, 5, 10, 11, 12]) == {
        "logprobs": 0,
        "prompt_logprob_token_ids": [[13], []],
        "prompt_logprob_start": 2,
    }


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"timestamp_granularities[]": ["segment"]}, "timestamp_granularities[]"),
        ({"include[]": ["logprobs"], "response_format": "verbose_json"}, "include[]"),
        ({"stream": True, "response_format": "srt"}, "stream"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_fields_that_contradict_each_other_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        AudioForm(b"", fields, "transcribe")
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("granularities", "has"),
    [([], (True, False)), (["word", "word"], (False, True)), (["word", "segment"], (True, True))],
)
def test_what_an_answer_with_times_has(granularities: list[str], has: tuple[bool, bool]) -> None:
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": granularities}
    form = AudioForm(b"", fields, "transcribe")
    assert (form.has_segments, form.has_words) == has


@pytest.mark.parametrize("num_samples", [1, 333, 7_000, 15_600, 15_601, 15_999, 16_000])
def test_a_spectrogram_equals_that_of_transformers(num_samples: int) -> None:
    extractor = transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=1)
    samples = np.random.default_rng(num_samples).normal(size=num_samples).astype(np.float32)
    samples *= np.sin(np.arange(num_samples) / 900)
    expected = extractor(samples, sampling_rate=16_000, return_tensors="np")["input_features"][0]
    found = Spectrogram(extractor)(samples)
    assert found.dtype == np.float32 and found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=2e-5)
