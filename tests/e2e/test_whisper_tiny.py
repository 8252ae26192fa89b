"""Whisper tiny.en with its real weights: the words of spoken texts, against `transformers`."""

import asyncio
import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import soundfile
import soxr
import torch
import transformers
from default_model import speech
from transformers.generation import GenerateEncoderDecoderOutput
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from octavo import AsyncClient, SamplingParams
from octavo.frontend.audio.prompts import AudioPrompts
from octavo.frontend.audio.speech_tokens import SpeechTokens
from octavo.frontend.http.app import create_app
from octavo.frontend.media.parts import MediaSource
from octavo.frontend.outputs import RequestOutput
from octavo.protocol.config import ServerConfig
from octavo.protocol.params import OutputKind

FOX = "The quick brown fox jumps over the lazy dog."
STORY = (
    "On the first cold day of April the ferry was late, and the harbour was full of people. Nobody looked at the sea. "
    "The old man closed his window, put on his coat, and went down to the harbour to look at the ships. "
    "There were three of them. The first one was painted green, and it had come from the north with a load of timber. "
    "The second one was empty. The third one was waiting for the tide, and its captain was asleep. "
    "In the evening the wind turned to the west, and all of them left before the moon came up. "
    "He stayed on the wall for another hour, and then he walked home through the quiet streets."
)
PROMPTS = {"text": "<|startoftranscript|><|notimestamps|>", "timestamps": "<|startoftranscript|>"}
RATE = 16_000


class Reference:
    """The model of `transformers`, with its rules."""

    def __init__(self, path: Path) -> None:
        self.extractor = transformers.WhisperFeatureExtractor.from_pretrained(path)
        self.model = transformers.WhisperForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.end = self.model.generation_config.eos_token_id

    def heard(self, samples: Any) -> Any:
        """Return what the encoder makes of a window."""
        features = self.extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
        with torch.no_grad():
            return self.model.get_encoder()(features)

    def assert_greedy(self, heard: Any, prompt: Sequence[int], tokens: list[int], mode: str) -> None:
        """Check that each token is the likeliest one that the rules leave after those before it."""
        rules = self.model.generation_config
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            logits = self.model(encoder_outputs=heard, decoder_input_ids=ids).logits[0]
        processors: list[Any] = [
            SuppressTokensLogitsProcessor(rules.suppress_tokens),
            SuppressTokensAtBeginLogitsProcessor(rules.begin_suppress_tokens, len(prompt)),
        ]
        if mode == "timestamps":
            processors.append(WhisperTimeStampLogitsProcessor(rules, len(prompt)))
        for index, token in enumerate(tokens):
            place = len(prompt) + index
            scores = logits[place - 1 : place].clone()
            for processor in processors:
                scores = processor(ids[:, :place], scores)
            assert int(scores.argmax()) == token, (mode, index, tokens)
        assert tokens[-1] == rules.eos_token_id

    def generated(self, samples: Any) -> list[int]:
        """Return the tokens of `generate`, which leaves out the prompt and the end."""
        features = self.extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
        with torch.no_grad():
            return list(self.model.generate(features, do_sample=False, num_beams=1)[0].tolist())

    def segments(self, samples: Any) -> list[tuple[float, float, str]]:
        """Return start, end and text of the segments of a clip of any length, which end with it at the latest."""
        duration_s = len(samples) / RATE
        whole: Any = {"truncation": False, "padding": "longest"} if duration_s > 30 else {}
        features = self.extractor(samples, sampling_rate=RATE, return_tensors="pt", **whole).input_features
        with torch.no_grad():
            found = self.model.generate(features, return_timestamps=True, return_segments=True, num_beams=1)
        return [
            (
                round(float(one["start"]), 2),
                round(min(float(one["end"]), duration_s), 2),
                self.tokenizer.decode([token for token in one["tokens"] if token < self.end]),
            )
            for one in found["segments"][0]
        ]

    def rows(self, heard: Any, prompt: Sequence[int], tokens: Sequence[int], num_rows: int) -> list[int]:
        """Return the row of the clip at which the token after each one begins."""
        rules, ids = self.model.generation_config, torch.tensor([[*prompt, *tokens]])
        self.model.set_attn_implementation("eager")
        with torch.no_grad():
            found = self.model(encoder_outputs=heard, decoder_input_ids=ids, output_attentions=True)
        outputs = GenerateEncoderDecoderOutput(sequences=ids, cross_attentions=(found.cross_attentions,))
        times = self.model._extract_token_timestamps(
            outputs, rules.alignment_heads, num_frames=2 * num_rows, num_input_ids=len(prompt)
        )
        return [round(float(time) / 0.02) for time in times[0, len(prompt) : -1]]

    def text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def test_tokens_and_words_equal_transformers(whisper_tiny: Path) -> None:
    reference = Reference(whisper_tiny)

    async def main() -> None:
        async with await AsyncClient.launch(str(whisper_tiny), dtype="float32", max_num_seqs=8) as client:
            (fox,), story = await windows_of(client, FOX), await windows_of(client, STORY)
            assert len(story) == 2
            heard, texts = [reference.heard(one) for one in (fox, *story)], []
            for mode in PROMPTS:
                outputs = await asyncio.gather(*(transcribed(client, one, mode) for one in (fox, *story)))
                for encoded, output in zip(heard, outputs, strict=True):
                    tokens = output.outputs[0].token_ids
                    reference.assert_greedy(encoded, output.prompt_token_ids, tokens, mode)
                    if mode == "text":
                        texts.append(reference.text(tokens))
                if mode == "text":
                    assert reference.generated(fox) == outputs[0].outputs[0].token_ids[:-1]
                else:
                    await assert_aligned(client, reference, (fox, *story), heard, outputs)
            assert "over the la" in texts[0] and "painted green" in texts[1], "it was understood"
            transport = httpx.ASGITransport(app=create_app(client, ServerConfig(allowed_origins=[])))
            async with httpx.AsyncClient(transport=transport, base_url="http://octavo.test", timeout=120) as http:
                for text, expected in ((FOX, texts[:1]), (STORY, texts[1:])):
                    files = {"file": ("a.wav", speech(text).read_bytes())}
                    answer = await http.post("/v1/audio/transcriptions", files=files)
                    assert answer.json()["text"] == " ".join(expected)
                for text in (FOX, STORY):
                    await assert_segments(http, reference, text)

    asyncio.run(main())


@pytest.mark.long
def test_segments_of_several_windows_equal_transformers(whisper_tiny: Path) -> None:
    """A text without pauses, and one whose windows end within a sentence."""
    reference = Reference(whisper_tiny)
    sentences = STORY.split(". ")
    texts = [" ".join([STORY.replace(". ", ", and ")] * 3), ". ".join([*sentences[::-1], *sentences[::2], *sentences])]

    async def main() -> None:
        async with await AsyncClient.launch(str(whisper_tiny), dtype="float32") as client:
            transport = httpx.ASGITransport(app=create_app(client, ServerConfig(allowed_origins=[])))
            async with httpx.AsyncClient(transport=transport, base_url="http://octavo.test", timeout=300) as http:
                for text in texts:
                    await assert_segments(http, reference, text)

    asyncio.run(main())


async def assert_segments(http: httpx.AsyncClient, reference: Reference, text: str) -> None:
    """The segments of a spoken text are those of `transformers`."""
    data = speech(text).read_bytes()
    expected = reference.segments(samples_of(data))
    form = {"response_format": "verbose_json"}
    answer = (await http.post("/v1/audio/transcriptions", files={"file": ("a.wav", data)}, data=form)).json()
    found = [(round(one["start"], 2), round(one["end"], 2), one["text"]) for one in answer["segments"]]
    assert found == expected


async def assert_aligned(
    client: AsyncClient, reference: Reference, clips: Sequence[Any], heard: Sequence[Any], outputs: list[RequestOutput]
) -> None:
    """Each token is spoken when `transformers` says, also if several texts are aligned at once."""
    found = await asyncio.gather(*map(partial(aligned, client), clips, outputs))
    for samples, encoded, output, rows in zip(clips, heard, outputs, found, strict=True):
        tokens = output.outputs[0].token_ids[:-1]
        assert rows == reference.rows(encoded, output.prompt_token_ids, tokens, len(samples) // 320)
        assert rows == await aligned(client, samples, output)


async def aligned(client: AsyncClient, samples: Any, output: RequestOutput) -> list[int]:
    assert isinstance(client.media, AudioPrompts)
    prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids[:-1]
    made = await client.media.of_tokens(prompt, [MediaSource("audio", (samples, RATE), "file")])
    assert client.config.model.media is not None
    spec = SpeechTokens.of(client.config.model.media.processor_path).alignment(len(prompt), len(samples) // 320)
    return list(map(int, (await client.pooler.align([*prompt, *tokens], made.items, spec)).array()))


async def windows_of(client: AsyncClient, text: str) -> list[Any]:
    """Return the samples of the windows of a spoken text, at 16 kHz."""
    assert isinstance(client.media, AudioPrompts)
    data = speech(text).read_bytes()
    result = await client.media.read(MediaSource("audio", data, "file"))
    samples = samples_of(data)
    return [samples[round(one.start_s * RATE) :][: round(one.duration_s * RATE)] for one in result.windows]


def samples_of(data: bytes) -> Any:
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    return soxr.resample(samples, rate, RATE)


async def transcribed(client: AsyncClient, samples: Any, mode: Any) -> RequestOutput:
    params = SamplingParams(temperature=0.0, max_tokens=None, speech_rules=mode, output_kind=OutputKind.FINAL_ONLY)
    prompt = {"prompt": PROMPTS[mode], "multi_modal_data": {"audio": (samples, RATE)}}
    return [output async for output in client.generate(prompt, params)][-1]
