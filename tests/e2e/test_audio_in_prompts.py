"""Audio clips as rows of prompts: through torch, through deaths of processes, in conversations, and over HTTP."""

import asyncio
import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import transformers
from engine_kills import assert_deaths_change_nothing
from hung_steps import PLUGIN
from media_compare import GREEDY, audio_prompt, compare, result, run
from servers import Server, serve
from source_tree import ROOT
from tiny_audio_models import AUDIO, make_qwen2_audio
from tiny_whisper import RATE, wav, waveform

from octavo import LLM, AsyncClient, SamplingParams
from octavo.protocol import restarts
from octavo.protocol.errors import ConfigError, InvalidRequestError

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,  # chunks end inside of clips, which have up to 25 rows
    "encoder_cache_tokens": 60,  # of which two fit
}
PROMPTS = [
    audio_prompt(f"listen to {AUDIO} here", (1, 0.8)),
    audio_prompt(f"{AUDIO}{AUDIO}the same twice", (2, 1.0), (2, 1.0)),
    audio_prompt(f"one {AUDIO}, another {AUDIO}, and a third {AUDIO}", (1, 0.7), (2, 0.5), (3, 0.99)),
    audio_prompt(f"ends with {AUDIO}", (4, 0.03)),
    audio_prompt("no sound at all"),
]
RENDERED = f"<|user|>\n<|audio_bos|>{AUDIO}<|audio_eos|>what is it?<|turn_end|>\n<|assistant|>\n"
QUESTION = {"type": "text", "text": "what is it?"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen2_audio(tmp_path_factory.mktemp("qwen2_audio"))


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(str(path), **SETTINGS) as llm:
        yield llm


def test_the_torch_kernels(path: Path) -> None:
    with LLM(str(path), **SETTINGS, cpu_kernels="torch") as llm:
        compare(llm, path, transformers.Qwen2AudioForConditionalGeneration, PROMPTS)
        alone = [result(run(llm, one)[0]) for one in PROMPTS]
        assert list(map(result, run(llm, *PROMPTS))) == alone


def test_the_forms_of_a_sound(llm: LLM) -> None:
    """Samples with their rate, samples at the model's, and a file are one clip, also in a conversation."""
    samples = np.round(waveform(6) * 32767).astype(np.float32) / 32768
    file = wav(samples * 32768 / 32767)
    url = "data:audio/wav;base64," + base64.b64encode(file).decode()
    given = [(samples, RATE), samples, [samples], samples.astype(np.float64), [(samples, RATE)], file, [url]]
    outputs = run(llm, *[{"prompt": RENDERED, "multi_modal_data": {"audio": one}} for one in given])
    parts = [
        {"type": "audio", "audio": (samples, RATE)},
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "input_audio", "input_audio": {"data": url.partition(",")[2], "format": "wav"}},
    ]
    chats = [[{"role": "user", "content": [part, QUESTION]}] for part in parts]
    outputs += llm.chat(chats, GREEDY, use_tqdm=False)
    assert [result(one) for one in outputs] == [result(outputs[0])] * 10
    uuids = [
        {"prompt": RENDERED, "multi_modal_data": data, "multi_modal_uuids": {"audio": ["six"]}}
        for data in ({"audio": samples}, {}, {"audio": waveform(1)})
    ]
    assert [result(run(llm, one)[0]) for one in uuids] == [result(outputs[0])] * 3


def test_what_is_refused(llm: LLM, path: Path) -> None:
    audio = [
        (b"no audio", "not audio"),
        (wav(waveform(1))[:40], "audio"),
        (np.zeros(0, dtype=np.float32), "no samples"),
        (np.zeros(100, dtype=np.float32), "100 samples, too few for a token"),
        ((waveform(1, 1.2), RATE), "longer than the 1 seconds that the model reads at once"),
        (np.array([np.nan], dtype=np.float32), "not finite"),
        ((waveform(1), "fast"), "sampling rate is 'fast'"),
        (np.zeros((2, 300), dtype=np.float32), "ndarray; expected"),
        (np.zeros(300, dtype=np.int16), "ndarray; expected"),
    ]
    for value, message in audio:
        with pytest.raises(InvalidRequestError, match=message) as caught:
            run(llm, {"prompt": AUDIO, "multi_modal_data": {"audio": value}})
        assert caught.value.param == "multi_modal_data['audio'][0]"
    for one, message in (
        (audio_prompt("no mark", (1, 0.5)), "0 placeholders of audio clips for 1 audio clips"),
        (
            {"prompt": AUDIO, "multi_modal_data": {"image": b""}},
            r"has \['image'\]; this model takes \{'audio': audio clip\}",
        ),
        ({**audio_prompt(AUDIO, (1, 0.5)), "mm_processor_kwargs": {"truncation": True}}, "audio clips take none"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            run(llm, one)
    assert run(llm, PROMPTS[0]), "the engine goes on"
    for setting, message in (
        ({"limit_mm_per_prompt": {"image": 1}}, "reads no media of kind 'image'"),
        ({"mm_processor_kwargs": {"truncation": False}}, "mm_processor_kwargs: .* takes no arguments"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(str(path), **SETTINGS, **setting)


def test_deaths_of_the_worker_and_the_core(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Audio clips are encoded again from their spectrograms."""
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)
    monkeypatch.setenv("OCTAVO_CHECK", "1")

    async def main() -> None:
        async with await AsyncClient.launch(str(path), **SETTINGS, logits_processors=[PLUGIN]) as client:
            params = SamplingParams(temperature=0.9, max_tokens=60, ignore_eos=True, logprobs=1)
            text = f"request {AUDIO} of {AUDIO}."
            await assert_deaths_change_nothing(
                client, lambda seed: audio_prompt(text, (seed % 4, 0.5), (seed % 3, 0.9)), params
            )

    asyncio.run(main())


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("sounds") / "one.wav"
    file.write_bytes(wav(waveform(1)))
    return file


@pytest.fixture(scope="module")
def server(path: Path, file: Path) -> Iterator[Server]:
    flags = ("--dtype", "float32", "--max-model-len", "256", "--served-model-name", "tiny", "--seed", "3")
    limits = ("--limit-mm-per-prompt", '{"audio": 2}', "--allowed-local-media-path", str(file.parent))
    with serve(path, *flags, *limits) as server:
        yield server.wait_until_ready()


def chat(server: Server, *parts: Any, **changes: Any) -> httpx.Response:
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": list(parts)}]
    body = {"model": "tiny", "max_tokens": 6, "temperature": 0, "messages": messages, "logprobs": True}
    return server.post("/v1/chat/completions", {**body, **changes})


def test_chat_completions(server: Server, file: Path) -> None:
    data = base64.b64encode(file.read_bytes()).decode()
    given = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    forms = [
        given,
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}, "uuid": "one"},
        {"type": "audio_url", "audio_url": None, "uuid": "one"},
        {"type": "audio_url", "audio_url": {"url": f"file://{file}"}},
    ]
    answers = [chat(server, QUESTION, form, QUESTION).json() for form in forms]
    assert all(one["choices"] == answers[0]["choices"] for one in answers)
    twice = chat(server, given, QUESTION, given).json()["usage"]["prompt_tokens"]
    assert twice > answers[0]["usage"]["prompt_tokens"] + 10
    metrics = server.get("/metrics").text
    assert float(metrics.partition("octavo:mm_cache_hits_total{")[2].split()[1]) >= 3
    asked = {
        "model": "tiny",
        "max_output_tokens": 16,
        "temperature": 0,
        "input": [{"role": "user", "content": [given]}],
    }
    response = server.post("/v1/responses", asked).json()
    same = chat(server, given, max_tokens=16, messages=[{"role": "user", "content": [given]}]).json()
    assert response["output"][0]["content"][0]["text"] == same["choices"][0]["message"]["content"]
    asked["input"] = [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_audio"}]}]
    refused = server.post("/v1/responses", asked)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[0].content[1]")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for parts, where, message in (
        ([QUESTION, {**given, "input_audio": {"data": "AAAA", "format": "wav"}}], 1, "not audio"),
        ([{**given, "input_audio": {"data": "?", "format": "wav"}}], 0, "not base64"),
        ([{"type": "input_audio", "input_audio": {"url": "?"}}], 0, "the base64 of a file"),
        ([{"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:1/a.wav"}}], 0, "no public address"),
        ([{"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}], 0, "no such file in the directory"),
        ([{"type": "audio_url"}], 0, "audio_url is missing"),
        ([QUESTION, image], 1, "this model reads audio clips and no images"),
        ([given] * 3, 2, "has 3 audio clips, and the limit is 2"),
    ):
        refused = chat(server, *parts)
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert message in error["message"]
        assert error["param"] == f"messages[1].content[{where}]"


def test_the_examples_of_the_documentation(server: Server, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    section = (ROOT / "docs/multimodal.md").read_text().partition("## Audio in conversations")[2].partition("\n## ")[0]
    first, second = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"LLM": lambda model: llm}
    code = first.replace("Qwen/Qwen2-Audio-7B-Instruct", "tiny").replace("http://127.0.0.1:8000", server.url)
    exec(compile(code, "first", "exec"), names)
    exec(compile(second, "second", "exec"), names)
    assert len(capsys.readouterr().out.splitlines()) >= 2
