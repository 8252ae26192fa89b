"""`/v1/audio/transcriptions` and `/v1/audio/translations` on a whole engine, against the model of `transformers`."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers
from engine_kills import kill_worker_and_core
from fake_client import FakeClient
from http_client import request
from hung_steps import PLUGIN, hang_at
from tiny_whisper import RATE, make_whisper, wav, waveform
from waiting import until

from octavo import AsyncClient, SamplingParams
from octavo.frontend.audio.prompts import AudioPrompts
from octavo.frontend.audio.speech_tokens import SpeechTokens
from octavo.frontend.audio.transcriber import WINDOWS_AT_ONCE
from octavo.frontend.http.app import create_app
from octavo.frontend.media.parts import MediaSource
from octavo.frontend.outputs import RequestOutput
from octavo.protocol import restarts
from octavo.protocol.admin import DrainEngine
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import InvalidRequestError

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 6,
    "encoder_cache_tokens": 160,
    "served_model_name": ["w"],
}
PATH = "/v1/audio/transcriptions"
MAX_TOKENS = 20
FILE = {"file": ("a.wav", wav(waveform(1)))}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("whisper"))


def served(path: Path, act: Callable[[AsyncClient, httpx.AsyncClient], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        async with await AsyncClient.launch(str(path), **SETTINGS, **settings) as client:
            transport = httpx.ASGITransport(app=create_app(client, ServerConfig(allowed_origins=[])))
            async with httpx.AsyncClient(transport=transport, base_url="http://octavo.test", timeout=120) as http:
                await act(client, http)

    asyncio.run(main())


class Reference:
    """What the model of `transformers` writes down.

    Its own `generate` never ends with random weights: timestamps, which they draw, do not advance its windows.
    """

    def __init__(self, path: Path) -> None:
        self.extractor = transformers.WhisperFeatureExtractor.from_pretrained(path)
        self.model = transformers.WhisperForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.rules = self.model.generation_config

    def text(self, samples: "np.ndarray[Any, Any]", language: str | None, task: str = "transcribe") -> str:
        features = self.extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
        start, end = self.model.config.decoder_start_token_id, self.model.config.eos_token_id
        spoken = self.rules.lang_to_id[f"<|{language}|>"] if language else int(self._detect(features, start))
        ids = first = [start, spoken, self.rules.task_to_id[task], self.rules.no_timestamps_token_id]
        while len(ids) < len(first) + MAX_TOKENS and ids[-1] != end:
            logits = self._logits(features, ids)
            logits[self.rules.suppress_tokens] = -torch.inf
            if len(ids) == len(first):
                logits[self.rules.begin_suppress_tokens] = -torch.inf
            ids = [*ids, int(logits.argmax())]
        return str(self.tokenizer.decode(ids[len(first) :], skip_special_tokens=True)).strip()

    def _detect(self, features: torch.Tensor, start: int) -> int:
        logits = self._logits(features, [start])
        return max(self.rules.lang_to_id.values(), key=lambda token: float(logits[token]))

    def _logits(self, features: torch.Tensor, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.model(input_features=features, decoder_input_ids=torch.tensor([ids])).logits
        return logits[0, -1]


def test_texts_equal_transformers_and_bad_forms_name_the_field(path: Path) -> None:
    reference = Reference(path)

    async def act(client: AsyncClient, http: httpx.AsyncClient) -> None:
        api = openai.AsyncOpenAI(api_key="none", base_url="http://octavo.test/v1", http_client=http, max_retries=0)
        limit = {"max_completion_tokens": MAX_TOKENS}
        for seed, language in ((1, "en"), (2, "de"), (3, None)):
            given = {} if language is None else {"language": language}
            file = ("a.wav", wav(waveform(seed)))
            heard = np.round(waveform(seed) * 32767).astype(np.float32) / 32768
            answer = await api.audio.transcriptions.create(model="w", file=file, extra_body=limit, **given)
            assert answer.text == reference.text(heard, language), (seed, language)
            assert answer.usage is not None and answer.usage.model_dump() == {"type": "duration", "seconds": 1}
        fields = {"language": "fr", "max_completion_tokens": str(MAX_TOKENS)}
        translated = await http.post("/v1/audio/translations", files=FILE, data=fields)
        assert translated.status_code == 200, translated.text
        heard = np.round(waveform(1) * 32767).astype(np.float32) / 32768
        assert translated.json()["text"] == reference.text(heard, "fr", "translate")
        await long_file(http)
        await formats(api, http)
        await streams(api, http)
        await caller_that_leaves(client, http)
        await server_that_aborts(client, http)
        await engine_that_drains(client, http)
        await bad_forms(http)
        assert client.num_live_requests == 0

    served(path, act)


async def long_file(http: httpx.AsyncClient) -> None:
    """A file of several windows is their texts, in order, and the same each time."""
    parts = [waveform(seed, 0.9) for seed in range(4)]
    fields = {"language": "en", "response_format": "text", "max_completion_tokens": "6"}
    texts = []
    for samples in (np.concatenate(parts), np.concatenate(parts)):
        answer = await http.post(PATH, files={"file": ("a.wav", wav(samples))}, data=fields)
        assert answer.status_code == 200, answer.text
        texts.append(answer.text)
    assert texts[0] == texts[1]
    first = await http.post(PATH, files={"file": ("a.wav", wav(parts[0]))}, data=fields)
    assert len(texts[0]) > 2 * len(first.text), "several windows"


LONG = wav(np.concatenate([waveform(seed, 0.9) for seed in range(4)]))
"""Several windows."""
SAMPLED = {"temperature": "0.8", "seed": "3", "max_completion_tokens": "12", "language": "de"}
"""Random weights repeat themselves otherwise."""
DETECTED = {name: value for name, value in SAMPLED.items() if name != "language"}
FORMS: list[dict[str, str]] = [{}, {"stream": "true"}, {"response_format": "verbose_json"}]
"""Windows run at once, or one after another."""


async def formats(api: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    """Segments have text and rising times, and subtitles have the same ones."""
    answer = await http.post(PATH, files={"file": LONG}, data={**SAMPLED, "response_format": "verbose_json"})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["task"], body["language"], body["duration"]) == ("transcribe", "de", pytest.approx(3.6))
    segments, ends = body["segments"], 0.0
    assert [one["id"] for one in segments] == list(range(len(segments))) and len({one["seek"] for one in segments}) > 2
    for one in segments:
        assert ends <= one["start"] + 1e-6 and one["start"] <= one["end"] <= 3.6 + 1e-6
        ends = one["end"] if one is not segments[-1] else 0.0
        assert one["tokens"] and one["text"] and one["avg_logprob"] < 0 and 0 < one["no_speech_prob"] < 1
        assert one["temperature"] == 0.8 and one["compression_ratio"] > 0
    assert "".join(body["text"].split()) == "".join("".join(one["text"] for one in segments).split())
    parsed = await api.audio.transcriptions.create(
        model="w", file=("a.wav", LONG), response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert parsed.segments and parsed.usage is not None and parsed.usage.seconds == 4
    await words(http, body)
    for form, kind, mark in (("srt", "application/x-subrip", ","), ("vtt", "text/vtt; charset=utf-8", ".")):
        answer = await http.post(PATH, files={"file": LONG}, data={**SAMPLED, "response_format": form})
        assert answer.headers["content-type"].startswith(kind.split(";")[0])
        times = [line for line in answer.text.splitlines() if " --> 00:00:0" in line]
        assert len(times) == len(segments) and times[0].startswith(f"00:00:0{int(segments[0]['start'])}{mark}")


async def words(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """Words are those of the text, with rising times; other requests of their steps change nothing."""
    fields = {**SAMPLED, "response_format": "verbose_json", "timestamp_granularities[]": ["word"]}

    async def ask(file: bytes) -> dict[str, Any]:
        answer = await http.post(PATH, files={"file": file}, data=fields)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    files = [LONG, *(wav(waveform(seed, 0.7)) for seed in range(3))]
    alone = [await ask(file) for file in files]
    assert await asyncio.gather(*map(ask, files)) == alone
    assert "segments" not in alone[0] and alone[0]["text"] == body["text"] and len(alone[0]["words"]) > 4
    spoken = "".join("".join(one["word"].split()) for one in alone[0]["words"])
    assert spoken == "".join(alone[0]["text"].split())
    last = 0.0
    for one in alone[0]["words"]:
        assert last <= one["start"] + 1e-6 and one["start"] <= one["end"] <= 3.6 + 1e-6
        last = one["start"]


async def streams(api: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    """The text of the events is that of the whole answer; clients of OpenAI and of vLLM both find it."""
    whole = await http.post(PATH, files={"file": LONG}, data={**SAMPLED, "include[]": "logprobs"})
    extra = {"seed": 3, "max_completion_tokens": 12}
    events = [
        event
        async for event in await api.audio.transcriptions.create(
            model="w", file=("a.wav", LONG), language="de", temperature=0.8, stream=True, extra_body=extra
        )
    ]
    assert [event.type for event in events] == ["transcript.text.delta"] * (len(events) - 1) + ["transcript.text.done"]
    text = whole.json()["text"]
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == text and len(events) > 10
    assert events[-1].usage.output_tokens == len(whole.json()["logprobs"])
    answer = await http.post(PATH, files={"file": LONG}, data={**SAMPLED, "include[]": "logprobs", "stream": "true"})
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == text
    assert {chunk["object"] for chunk in chunks} == {"transcription.chunk"}
    assert [one for chunk in chunks[:-1] for one in chunk["logprobs"]] == whole.json()["logprobs"]
    translated = await http.post(f"{PATH[:-14]}translations", files={"file": LONG}, data={"stream": "1", **SAMPLED})
    assert '"object":"translation.chunk"' in translated.text


async def caller_that_leaves(client: AsyncClient, http: httpx.AsyncClient) -> None:
    """Some windows of a file run at the same time; all end with their caller."""
    samples = np.concatenate([waveform(seed, 0.9) for seed in range(30)])
    fields = {"language": "en", "max_completion_tokens": "20"}
    for form in FORMS:
        data = {**fields, **form}
        asking = asyncio.create_task(http.post(PATH, files={"file": ("a.wav", wav(samples))}, data=data))
        await until(lambda: client.num_live_requests)
        assert client.num_live_requests <= WINDOWS_AT_ONCE
        asking.cancel()
        await until(lambda: not client.num_live_requests)
    assert (await http.post(PATH, files=FILE, data=fields)).status_code == 200


async def server_that_aborts(client: AsyncClient, http: httpx.AsyncClient) -> None:
    """A window that the server ends fails its request: without it the text would pass for whole."""
    for form in (DETECTED, *({**SAMPLED, **form} for form in FORMS)):
        asking = asyncio.create_task(http.post(PATH, files={"file": LONG}, data=form))
        while not asking.done():  # no window can end between its start and the next turn of the loop
            client.abort_all()
            await asyncio.sleep(0)
        answer = await asking
        assert answer.status_code == 503 and "the server ended before the answer was complete" in answer.text


async def engine_that_drains(client: AsyncClient, http: httpx.AsyncClient) -> None:
    """A drain finishes the clips that have begun, and refuses others."""
    link, generate = cast(Any, client.engine_set.link), client.generate

    async def drained(*args: Any, **fields: Any) -> AsyncGenerator[RequestOutput, None]:
        async for output in generate(*args, **fields):
            await link.call(DrainEngine())
            yield output

    for form in ({**SAMPLED, "response_format": "verbose_json"}, DETECTED):
        expected = await http.post(PATH, files={"file": LONG}, data=form)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client, "generate", drained)
            assert (await http.post(PATH, files={"file": LONG}, data=form)).json() == expected.json()
        refused = await http.post(PATH, files={"file": LONG}, data=form)
        assert refused.status_code == 503 and "drains" in refused.text
        await link.call(DrainEngine(is_draining=False))


async def bad_forms(http: httpx.AsyncClient) -> None:
    for fields, param, message in (
        ({"language": "xx"}, "language", "knows de, en, fr"),
        ({"response_format": "docx"}, "response_format", "json or text or verbose_json"),
        ({"stream": "maybe"}, "stream", "expected a JSON boolean"),
        ({"temperature": "hot"}, "temperature", "expected a JSON number"),
        ({"temperature": "-1"}, "temperature", "temperature"),
        ({"timestamp_granularities[]": "line"}, "timestamp_granularities[]", "expected word or segment"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities[]", "needs response_format verbose_json"),
        ({"to_language": "en"}, "to_language", "not supported"),
        ({"prompt": "<|de|> words"}, "prompt", "special tokens"),
    ):
        answer = await http.post(PATH, files=FILE, data=fields)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param and message in answer.json()["error"]["message"]
    answer = await http.post(PATH, files={"file": ("a.wav", b"no audio")})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "file"
    assert (await http.post(PATH, files=FILE, data={"model": "other"})).status_code == 404
    assert (await http.post(PATH, json={})).status_code == 415
    crossed = {"origin": "http://elsewhere.test", "sec-fetch-site": "cross-site"}
    assert (await http.post(PATH, files=FILE, headers=crossed)).status_code == 403


def test_a_window_that_fails_ends_its_request_and_deaths_change_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)
    monkeypatch.setenv("OCTAVO_CHECK", "1")
    at_worker, at_core = tmp_path / "worker", tmp_path / "core"
    many = wav(np.concatenate([waveform(seed, 0.9) for seed in range(9)]))
    short = wav(np.concatenate([waveform(seed, 0.9) for seed in range(3)]))

    async def act(client: AsyncClient, http: httpx.AsyncClient) -> None:
        for form in FORMS:
            refused = await http.post(PATH, files={"file": many}, data={**SAMPLED, **form})
            assert refused.status_code == 400 and "--max-media-bytes" in refused.text, refused.text
            assert client.num_live_requests == 0
        held = await cast(AudioPrompts, client.media).read(MediaSource("audio", LONG, "file"))
        refused = await http.post(PATH, files={"file": LONG}, data=SAMPLED)
        assert refused.status_code == 503 and "--max-media-bytes" in refused.text, "windows that wait count"
        del held

        async def ask(form: str, file: bytes) -> bytes:
            fields: dict[str, Any] = {**SAMPLED, "max_completion_tokens": "60", "response_format": form}
            if form == "verbose_json":
                fields["timestamp_granularities[]"] = ["segment", "word"]
            return (await http.post(PATH, files={"file": file}, data=fields)).raise_for_status().content

        expected = [await ask("verbose_json", LONG), await ask("json", short)]
        hang_in_windows(client, monkeypatch, at_worker, at_core)
        asking = asyncio.gather(ask("verbose_json", LONG), ask("json", short))
        await kill_worker_and_core(client, at_worker, at_core, asking)
        assert await asking == expected

    served(path, act, max_media_bytes=7 * 4 * 20 * 100, logits_processors=[PLUGIN])  # seven windows


def hang_in_windows(client: AsyncClient, monkeypatch: pytest.MonkeyPatch, first: Path, last: Path) -> None:
    """Let the worker hang in the second window of a file, and another in the fourth."""
    generate = client.generate
    marks = {"1": hang_at({0: first}), "3": hang_at({0: last})}

    def generate_and_hang(prompt: Any, params: SamplingParams, *, request_id: str) -> Any:
        extra_args = marks.get(request_id.rpartition("-")[2])
        return generate(prompt, params.clone(extra_args=extra_args), request_id=request_id)

    monkeypatch.setattr(client, "generate", generate_and_hang)


def test_a_model_of_text_does_not_transcribe() -> None:
    answer = request(FakeClient("text"), "POST", PATH, files=FILE)
    assert answer.status_code == 400 and "does not transcribe" in answer.json()["error"]["message"]


def test_decoder_prompts() -> None:
    tokens = SpeechTokens(10, 9, 14, 13, {"en": 11}, {"transcribe": 12, "translate": 15}, ())
    assert tokens.prompt("en", "translate", range(9), 10) == [13, 5, 6, 7, 8, 10, 11, 15, 14]
    assert tokens.prompt("en", "transcribe", [], 10, has_timestamps=True) == [10, 11, 12]
    english = SpeechTokens(10, 9, 14, None, {}, {}, ())
    assert english.prompt(None, "transcribe", [], 10) == [10, 14]
    for language, task, before, param in (
        ("de", "transcribe", [], "language"),
        ("en", "translate", [], "model"),
        ("en", "transcribe", [1], "prompt"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            english.prompt(language, task, before, 10)
        assert caught.value.param == param
