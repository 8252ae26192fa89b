"""`/v1/audio/transcriptions` with a language model that reads clips in its prompts: Voxtral."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
from media_compare import result, run
from tiny_audio_models import make_qwen2_audio, make_voxtral
from tiny_whisper import wav, waveform

from octavo import LLM, AsyncClient, SamplingParams
from octavo.frontend.http.app import create_app
from octavo.protocol.config import ServerConfig

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "served_model_name": ["v"],
    "max_model_len": 124,
    "encoder_cache_tokens": 50,  # two windows
    "max_num_encoder_tokens": 30,  # a step encodes one
}
FILE = {"file": ("a.wav", wav(waveform(1, 2.4)))}


async def post(http: httpx.AsyncClient, name: str = "transcriptions", **fields: Any) -> httpx.Response:
    data = {"model": "v", "max_completion_tokens": "12", **fields}
    return await http.post(f"/v1/audio/{name}", files=FILE, data=data)


async def check(client: AsyncClient, http: httpx.AsyncClient) -> dict[str, Any]:
    """Return the texts by language."""
    answers = {language: (await post(http, language=language)).json() for language in ("en", "")}
    assert all(one["usage"] == {"type": "duration", "seconds": 3} for one in answers.values())
    assert (await post(http, response_format="text")).text == answers[""]["text"] + "\n"
    lines = (await post(http, stream="true")).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(one.get("delta") or "" for one in events) == events[-1]["text"] == answers[""]["text"]
    assert events[-1]["usage"]["input_tokens"] > 3 * 25
    stats = await client.engine_stats()
    assert stats.num_cached_encoder_tokens == 50 < 3 * 25 <= stats.encoder_tokens, "a clip of more is read"
    for name, fields, param in (
        ("translations", {}, "model"),
        ("transcriptions", {"response_format": "srt"}, "response_format"),
        ("transcriptions", {"prompt": "before"}, "prompt"),
        ("transcriptions", {"language": "English"}, "language"),
    ):
        refused = await post(http, name, **fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    long = await http.post(
        "/v1/audio/transcriptions", files={"file": ("a.wav", wav(waveform(1, 4.2)))}, data={"model": "v"}
    )
    assert (long.status_code, long.json()["error"]["param"]) == (400, "file")
    assert "it has 125 tokens, and the limit is 124 (--max-model-len)" in long.json()["error"]["message"]
    return {language: one["text"] for language, one in answers.items()}


async def served(path: Path, act: Any) -> Any:
    async with await AsyncClient.launch(str(path), **SETTINGS) as client:
        transport = httpx.ASGITransport(app=create_app(client, ServerConfig(allowed_origins=[])))
        async with httpx.AsyncClient(transport=transport, base_url="http://octavo.test", timeout=120) as http:
            return await act(client, http)


def test_voxtral(tmp_path: Path) -> None:
    """A file of three windows is one prompt, with the language if there is one, as `mistral-common` has it."""
    path = make_voxtral(tmp_path)
    texts = asyncio.run(served(path, check))
    with LLM(str(path), **SETTINGS) as llm:
        for language, said in (("en", "lang:en"), ("", "")):
            prompt = f"[INST][BEGIN_AUDIO][AUDIO][/INST]{said}[TRANSCRIBE]"
            params = SamplingParams(temperature=0.0, max_tokens=12)
            (output,) = run(llm, {"prompt": prompt, "multi_modal_data": {"audio": FILE["file"][1]}}, params=params)
            assert output.outputs[0].text.strip() == texts[language], result(output)
    assert texts["en"] != texts[""]


def test_other_models_say_so(tmp_path: Path) -> None:
    async def refused(_: AsyncClient, http: httpx.AsyncClient) -> httpx.Response:
        return await post(http)

    answer = asyncio.run(served(make_qwen2_audio(tmp_path), refused))
    assert answer.status_code == 400
    assert "use Whisper or Voxtral" in answer.json()["error"]["message"]
