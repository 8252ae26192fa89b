"""Receipts of all kinds of requests, verified on an engine, and every way in which a saved answer may not be equal."""

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from adapter_files import write_adapter
from starlette.types import ASGIApp
from tiny_models import make_tiny
from waiting import wait_until

from octavo import AsyncClient
from octavo.frontend.batch.asgi_call import Response, call
from octavo.frontend.batch.lines import read_lines
from octavo.frontend.batch.own_engine import serving
from octavo.frontend.batch.runner import answer_lines, one_by_one
from octavo.frontend.cli.verify import Verification
from octavo.protocol.config import ServerConfig
from octavo.protocol.config.sources import engine_config

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ASK = {"messages": [{"role": "user", "content": "What is the weather?"}], "max_tokens": 24}
CITY = {"type": "object", "properties": {"city": {"enum": ["Ulm", "Bonn"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {**ASK, "n": 2, "ignore_eos": True}),
    (CHAT, {**ASK, **STREAM, "seed": -5, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {**ASK, "tools": [TOOL], "tool_choice": "required", "max_tokens": 200}),
    (CHAT, {**ASK, "stream": True, "tools": [TOOL], "response_format": {"type": "json_object"}, "tool_choice": "none"}),
    (CHAT, {**ASK, "temperature": 0, "model": "sql"}),
    (COMPLETIONS, {"prompt": ["one", [5, 6, 7], "three"], "n": 2, "max_tokens": 9, "logprobs": 3, "ignore_eos": True}),
    (COMPLETIONS, {"prompt": [5, 6, 7], "best_of": 3, "stop": ["e"], "max_tokens": 40, "priority": 0}),
    (
        COMPLETIONS,
        {
            "prompt": "go",
            "stream": True,
            "stream_interval": 4,
            "ignore_eos": True,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
        },
    ),
    (COMPLETIONS, {"prompt": "go", "use_beam_search": True, "n": 2, "max_tokens": 6}),
    (COMPLETIONS, {"prompt": "echo me", "echo": True, "logprobs": 1, "prompt_logprobs": 1, "guided_regex": "[a-f]{9}"}),
]


@dataclass
class Engine:
    """An engine behind the routes of a server with a log of receipts."""

    runner: asyncio.Runner
    client: AsyncClient
    app: ASGIApp
    log: Path

    def post(self, url: str, body: dict[str, Any], *headers: tuple[bytes, bytes]) -> Response:
        return self.runner.run(call(self.app, url, json.dumps(body).encode(), "the same seeds in every run", headers))

    def verify(self, path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
        """Return the exit code and the output of `octavo verify` without its engine."""
        verification = Verification(path)
        self.runner.run(verification.verify(self.client, self.app))
        print(verification.render())
        return verification.exit_code, capsys.readouterr().out


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("receipts")
    model = make_tiny("LlamaForCausalLM", directory / "model", head_dim=8)  # its queries are as wide as its rows
    adapter = write_adapter(directory / "sql", width=48)
    settings = {"dtype": "float32", "cpu_kernels": "torch", "max_model_len": 512, "max_num_seqs": 8}
    config = engine_config({"model": str(model), "enable_lora": True, **settings})
    server = ServerConfig(
        receipts=str(directory / "log"),
        lora_modules=[f"sql={adapter}"],
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
    )
    with asyncio.Runner() as runner:
        serving_ = serving(config, server)
        client, app = runner.run(serving_.__aenter__())
        try:
            yield Engine(runner, client, app, directory / "log")
        finally:
            runner.run(serving_.__aexit__(None, None, None))


def receipt_of(response: Response, *, is_stream: bool = False) -> dict[str, Any]:
    assert response.status == 200, response.body
    if is_stream:
        assert response.body.endswith(b"data: [DONE]\n\n")
        return json.loads(response.body.split(b"\n\n")[-3].removeprefix(b"data: "))["receipt"]
    return json.loads(response.body)["receipt"]


def tampered_with(records: list[dict[str, Any]]) -> list[tuple[int, str, dict[str, Any]]]:
    """Return changed records of `REQUESTS`, each with its outcome and what the report says."""

    def with_sequence(number: int, prompt: int = 0, **fields: Any) -> dict[str, Any]:
        return changed(number, "receipt", "prompts", prompt, "sequences", -1, **fields)

    def changed(number: int, *path: int | str, **fields: Any) -> dict[str, Any]:
        record = part = json.loads(json.dumps(records[number]))
        for name in path:
            part = part[name]
        part.update(fields)
        return record  # type: ignore[no-any-return]

    def of(number: int, prompt: int = 0) -> tuple[list[int], str]:
        sequence = records[number]["receipt"]["prompts"][prompt]["sequences"][-1]
        return sequence["token_ids"], sequence["logprobs"]

    print_, prompt = ("receipt", "fingerprint"), ("receipt", "prompts", 0)
    of_token = r"different at token 3: 7 with logprobs (\w{8}) recorded, (?!7 )\d+ with logprobs \1 here of choice 1"
    of_bits = r"different at token 1: (\d+) with logprobs 0{8} recorded, \1 with logprobs \w{8} here of choice 1 of pro"
    (ids, bits), aborted = of(0), {"digest": "", "finish_reason": "abort"}
    return [
        (1, of_token, with_sequence(0, token_ids=[*ids[:3], 7, *ids[4:]])),
        (1, of_bits, with_sequence(5, 2, logprobs=of(5, 2)[1][:8] + "0" * 8 + of(5, 2)[1][16:])),
        (1, "different digest of all", with_sequence(7, digest="00")),
        (1, "different end", with_sequence(7, stop_reason="x")),
        (
            1,
            r"at token 5: none \(finish_reason length\) recorded",
            with_sequence(0, token_ids=ids[:5], logprobs=bits[:40]),
        ),
        (1, "different logprobs of the prompt", changed(9, *prompt, prompt_logprobs="00")),
        (0, "equal: 28 tokens up to an abort", with_sequence(0, token_ids=ids[:4], logprobs=bits[:32], **aborted)),
        (
            2,
            r"dtype is bfloat16 in the receipt, float32 here \(--dtype bfloat16\)",
            changed(0, *print_, dtype="bfloat16"),
        ),
        (2, "weights is 00 in the receipt", changed(0, *print_, weights="00")),
        (2, "adapter 'sql' with digest 0000... is not loaded", changed(4, *print_, adapter="0000")),
        (2, "the prompt has other tokens", changed(1, "request", messages=[{"role": "user", "content": "Hi"}])),
        (2, "temperature is the default in the receipt, 0.5 here", changed(7, "request", temperature=0.5)),
        (2, "this engine does not answer the request: min_p must be", changed(7, "request", min_p=2)),
        (2, "has 1 prompts, its receipt has 3", changed(5, "request", prompt="one")),
        (2, "receipt of format 9", changed(0, "receipt", format=9)),
        (2, "has no receipt", {"request": {}}),
    ]


def num_lines(log: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in log.iterdir())


def save(path: Path, *answers: Any) -> Path:
    path.write_text("".join([json.dumps(answer) + "\n" for answer in answers]))
    return path


def test_the_log_of_a_server_is_equal_and_tampering_is_found(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for url, body in REQUESTS:
        response = engine.post(url, body)
        assert response.status == 200, response.body
        assert b'"receipt"' not in response.body, "nobody has asked for it"
    wait_until(lambda: num_lines(engine.log) == len(REQUESTS))
    shutil.copytree(engine.log, copy := tmp_path / "log")
    code, output = engine.verify(copy, capsys)
    lines = output.splitlines()
    assert len(lines) == len(REQUESTS) + 1 and code == 0, output
    assert all(re.search(r":\d+: equal: \d+ tokens$", line) for line in lines[:-1]), output
    assert re.fullmatch(rf"{len(REQUESTS)} answers: {len(REQUESTS)} equal; \d+ tokens are equal", lines[-1])

    (file,) = copy.iterdir()
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [json.dumps(record["request"]) for record in records] == [json.dumps(body) for _, body in REQUESTS]
    seeds = [prompt["seed"] for prompt in records[5]["receipt"]["prompts"]]
    assert len(set(seeds)) == 3, "prompts of a request without a seed have their own"

    tampered = tampered_with(records)
    code, output = engine.verify(save(tmp_path / "tampered.jsonl", *[one for *_, one in tampered]), capsys)
    assert code == 1
    for line, (outcome, pattern, _) in zip(output.splitlines(), tampered, strict=False):
        assert re.search(pattern, line), output
        assert ("incomparable: " in line) == (outcome == 2), line
    code, output = engine.verify(save(tmp_path / "other.jsonl", tampered[6][2], tampered[7][2]), capsys)
    assert code == 2 and output.endswith("2 answers: 1 equal, 1 incomparable; 28 tokens are equal\n")


def test_a_response_has_its_receipt_on_demand(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (b"x-octavo-receipt", b"1")
    saved = []
    for url, body in REQUESTS:
        response = engine.post(url, body, asked)
        receipt = receipt_of(response, is_stream=bool(body.get("stream")))
        if not body.get("stream"):
            saved.append({"request": body, "response": json.loads(response.body)})
        else:
            saved.append({"request": body, "response": {"receipt": receipt}, "url": url})
    # What is saved over several lines is one answer.
    pretty = tmp_path / "pretty.json"
    pretty.write_text(json.dumps(saved[2], indent=2))
    assert saved[2]["response"]["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert engine.verify(pretty, capsys)[0] == 0
    code, output = engine.verify(save(tmp_path / "saved.jsonl", *saved), capsys)
    assert code == 0, output
    saved[0]["response"]["choices"][1]["message"]["content"] += "!"
    code, output = engine.verify(save(tmp_path / "forged.jsonl", saved[0]), capsys)
    assert code == 1 and "all tokens are equal, but not message of choice 1" in output

    # The digest stands for all of it: equal for equal requests, and the same in the header, the field and streams.
    body = {**ASK, "seed": 3, "return_receipt": True}
    whole, again, streamed = (engine.post(CHAT, {**body, **extra}) for extra in ({}, {"user": "x"}, {"stream": True}))
    digests = {receipt_of(whole)["digest"], receipt_of(again)["digest"], receipt_of(streamed, is_stream=True)["digest"]}
    assert len(digests) == 1
    assert receipt_of(engine.post(CHAT, {**body, "seed": 4}))["digest"] not in digests
    wrong = engine.post(CHAT, ASK, (b"x-octavo-receipt", b"yes"))
    assert wrong.status == 400 and b"must be 1 or 0, got 'yes'" in wrong.body


def test_results_of_a_batch_hold_all_that_is_needed(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bodies = [(url, body) for url, body in REQUESTS if not body.get("stream")]
    lines = [{"custom_id": str(index), "url": url, "body": body} for index, (url, body) in enumerate(bodies)]
    lines.append({"custom_id": "wrong", "url": CHAT, "body": {}})
    results: list[Any] = []
    source = read_lines([json.dumps(line).encode() for line in lines])
    engine.runner.run(answer_lines(engine.app, engine.client, one_by_one(source), results.append, 4, has_receipts=True))
    path = tmp_path / "results.jsonl"
    path.write_bytes(b"".join([msgspec.json.encode(result) + b"\n" for result in results]))
    code, output = engine.verify(path, capsys)
    assert code == 2 and f"{len(bodies)} equal, 1 incomparable" in output, output
