"""`octavo bench`: workloads, arrivals and figures; load on the real server without an engine."""

import argparse
import asyncio
import itertools
import json
import math
import random
import socket
import statistics
from pathlib import Path
from typing import Any

import pytest
from fake_client import FakeClient, byte_tokenizer
from fake_server import fake_server
from pooling_fakes import EMBED

from octavo.frontend.cli import main
from octavo.frontend.cli.bench.arrivals import arrivals, arrivals_of
from octavo.frontend.cli.bench.datasets import SampleRequest, draw_samples
from octavo.frontend.cli.bench.figures import Outcome, percentile, summarize
from octavo.frontend.cli.bench.load import Load, Target
from octavo.frontend.cli.bench.serve import parser
from octavo.frontend.cli.bench.startup import listens
from octavo.frontend.cli.bench.tokenizers import LocalTokenizer
from octavo.frontend.cli.errors import CommandError

TOKENIZER = LocalTokenizer(byte_tokenizer())


def options(*words: str) -> argparse.Namespace:
    return parser().parse(words)


def samples(*words: str, seed: int = 0) -> list[SampleRequest]:
    return draw_samples(options(*words), TOKENIZER, seed)


def test_random_prompts_have_their_lengths_and_nothing_in_common() -> None:
    made = samples("--num-prompts", "20", "--input-len", "50", "--output-len", "7")
    assert {len(sample.prompt) for sample in made} == {50} and {sample.max_tokens for sample in made} == {7}
    assert len({sample.prompt[:8] for sample in made}) == 20
    assert made == samples("--num-prompts", "20", "--input-len", "50", "--output-len", "7")
    assert made != samples("--num-prompts", "20", "--input-len", "50", "--output-len", "7", seed=1)


def test_random_lengths_spread_and_share_a_prefix() -> None:
    made = samples("--num-prompts", "200", "--random-input-len", "100", "--random-range-ratio", "0.5")
    lengths = [len(sample.prompt) for sample in made]
    assert 50 <= min(lengths) < 60 and 140 < max(lengths) <= 150
    made = samples("--num-prompts", "5", "--random-input-len", "10", "--random-prefix-len", "30")
    assert {len(sample.prompt) for sample in made} == {40} and len({sample.prompt[:30] for sample in made}) == 1


def test_prefixes_are_repeated() -> None:
    words = "--dataset-name prefix_repetition --num-prompts 12 --prefix-repetition-num-prefixes 3"
    made = samples(*f"{words} --prefix-repetition-prefix-len 20 --prefix-repetition-suffix-len 10".split())
    prefixes = [sample.prompt[:20] for sample in made]
    assert {len(sample.prompt) for sample in made} == {30}
    assert [prefixes.count(prefix) for prefix in set(prefixes)] == [4, 4, 4]
    assert len({sample.prompt for sample in made}) == 12


def test_custom_prompts_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one", "output_tokens": 5}\n\n{"prompt": "two"}\n')
    words = ["--dataset-name", "custom", "--dataset-path", str(file)]
    assert samples(*words, "--num-prompts", "2") == [SampleRequest("one", 5), SampleRequest("two", 256)]
    assert samples(*words, "--num-prompts", "1", "--output-len", "3") == [SampleRequest("one", 3)]
    with pytest.raises(CommandError, match="has 2 prompts"):
        samples(*words, "--num-prompts", "3")
    file.write_text('{"prompt": "one"}\n{"text": "two"}\n')
    with pytest.raises(CommandError, match="line 2 of"):
        samples(*words, "--num-prompts", "1")
    with pytest.raises(CommandError, match="reads a file"):
        samples("--dataset-name", "custom")


def test_sharegpt_takes_two_turns_of_a_fair_length(tmp_path: Path) -> None:
    def talk(*texts: str) -> dict[str, Any]:
        return {"conversations": [{"from": "x", "value": text} for text in texts]}

    file = tmp_path / "talks.json"
    talks = [talk("a question", "an answer!", "more"), talk("alone"), talk("hi", "too short"), talk("q" * 1025, "long")]
    file.write_text(json.dumps(talks))
    words = ["--dataset-name", "sharegpt", "--dataset-path", str(file)]
    assert samples(*words, "--num-prompts", "1") == [SampleRequest("a question", 10)]
    with pytest.raises(CommandError, match="has 1 usable"):
        samples(*words, "--num-prompts", "2")
    file.write_text('{"a": 1}')
    with pytest.raises(CommandError, match="not a ShareGPT file"):
        samples(*words)


def test_arrivals_have_the_rate_and_the_burstiness() -> None:
    assert arrivals(3, lambda share: math.inf, 1.0, random.Random(0)) == [0.0] * 3
    for burstiness in (0.25, 1.0, 4.0):
        times = arrivals(20_000, lambda share: 50.0, burstiness, random.Random(0))
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
        # Of a gamma distribution with shape k, the deviation is the mean over the root of k.
        assert statistics.pstdev(gaps) == pytest.approx(1 / 50 / math.sqrt(burstiness), rel=0.05)
    with pytest.raises(CommandError):
        arrivals_of(options("--request-rate", "0"), 3)


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 55.0), ("exponential", 10 * math.sqrt(10))])
def test_a_rate_that_grows(strategy: str, middle: float) -> None:
    ramp = options("--ramp-up-strategy", strategy, "--ramp-up-start-rps", "10", "--ramp-up-end-rps", "100")
    times = arrivals_of(ramp, 30_001)
    for place, rate in ((0, 10.0), (15_000, middle), (29_000, 100.0)):
        part = times[max(0, place - 400) : place + 400]
        assert (len(part) - 1) / (part[-1] - part[0]) == pytest.approx(rate, rel=0.2)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--ramp-up-start-rps", "1"], "needs a strategy"),
        (["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1"], "above 0"),
        (["--ramp-up-strategy", "linear", "--request-rate", "3"], "exclude one another"),
        (["--burstiness", "0"], "above 0"),
    ],
)
def test_arrivals_that_contradict_themselves(words: list[str], complaint: str) -> None:
    with pytest.raises(CommandError, match=complaint):
        arrivals_of(options(*words), 3)


def test_data_sets_of_the_hub_from_files_here(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "one"}\n{"turns": ["two", "three"]}\n{"answer": "none"}\n')
    (tmp_path / "b.csv").write_text('text,n\n"four, five",1\n')
    (tmp_path / "c.json").write_text('[{"messages": [{"role": "user", "content": "six"}]}]')
    words = ["--dataset-name", "hf", "--dataset-path", str(tmp_path), "--num-prompts", "4", "--hf-output-len", "9"]
    made = samples(*words)
    assert sorted(sample.prompt for sample in made) == ["four, five", "one", "six", "two"]
    assert {sample.max_tokens for sample in made} == {9}
    column = ["--hf-prompt-column", "answer", "--num-prompts", "1"]
    assert [sample.prompt for sample in samples(*words, *column)] == ["none"]
    with pytest.raises(CommandError, match="has 4 prompts"):
        samples(*words, "--num-prompts", "5")
    (tmp_path / "d.json").write_text("{")
    with pytest.raises(CommandError, match=r"cannot read .*d\.json"):
        samples(*words)
    with pytest.raises(CommandError, match="no file"):
        samples(*words, "--dataset-path", str(tmp_path / "nowhere"))


def test_percentiles_are_interpolated() -> None:
    assert percentile([], 50) == 0
    assert percentile([3.0], 99) == 3.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile([float(n) for n in range(101)], 99) == 99.0


def test_figures_by_hand() -> None:
    outcomes = [
        Outcome(0.0, 2.0, [1.0, 1.5, 2.0], num_prompt_tokens=10, num_cached_tokens=4, num_output_tokens=3),
        Outcome(0.5, 3.5, [1.5, 3.5], num_prompt_tokens=10, num_output_tokens=2),
        Outcome(2.0, 4.0, error="HTTP 500"),
    ]
    figures = summarize(outcomes, 4.0, ["ttft", "tpot", "itl", "e2el"], [100], {"ttft": 1000, "tpot": 600})
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert figures["request_throughput"] == 0.5 and figures["output_throughput"] == 1.25
    assert figures["total_token_throughput"] == 6.25 and figures["total_cached_tokens"] == 4
    assert figures["max_concurrent_requests"] == 2
    assert figures["request_goodput"] == 0.25
    assert figures["mean_ttft_ms"] == 1000
    assert figures["mean_tpot_ms"] == 1250 and figures["p100_tpot_ms"] == 2000
    assert figures["median_itl_ms"] == 500 and figures["p100_itl_ms"] == 2000
    assert figures["mean_e2el_ms"] == 2500


@pytest.mark.parametrize(
    ("targets_ms", "goodput"),
    [
        ({}, None),
        ({"ttft": 1000}, 1.0),
        ({"ttft": 999}, 0.0),
        ({"ttft": 1000, "e2el": 2000}, 0.5),
        ({"tpot": 500}, 0.5),
        ({"tpot": 1000, "itl": 1000}, 0.5),  # the other request has this mean, and a gap of 1.5 s
    ],
)
def test_goodput_counts_requests_that_meet_every_target(targets_ms: dict[str, float], goodput: float | None) -> None:
    outcomes = [
        Outcome(0.0, 2.0, [1.0, 1.5, 2.0], num_output_tokens=3),
        Outcome(0.0, 3.0, [1.0, 1.5, 3.0], num_output_tokens=3),
        Outcome(0.0, 0.1, error="HTTP 500"),
    ]
    assert summarize(outcomes, 2.0, [], [], targets_ms)["request_goodput"] == goodput


def test_load_keeps_connections_and_limits_what_is_in_flight() -> None:
    client = FakeClient("Hello!")
    most = 0

    async def work(url: str) -> list[Outcome]:
        nonlocal most
        load = Load(Target(url, "/v1/completions", {}))
        body = json.dumps({"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}).encode()

        def look() -> None:
            nonlocal most
            most = max(most, len(load._idle))

        outcomes = await load.run([body] * 30, [0.0] * 30, 4, look)
        load.close()
        return outcomes

    with fake_server(client) as url:
        outcomes = asyncio.run(work(url))
    assert [outcome.error for outcome in outcomes] == [""] * 30
    assert {outcome.text for outcome in outcomes} == {"Hello!"}
    assert {(outcome.num_prompt_tokens, outcome.num_output_tokens) for outcome in outcomes} == {(2, 6)}
    assert all(len(outcome.text_times) == 6 for outcome in outcomes)
    assert all(o.sent <= o.text_times[0] <= o.text_times[-1] <= o.finished for o in outcomes)
    assert summarize(outcomes, 1.0, [], [], {})["max_concurrent_requests"] == 4
    assert most <= 4


def test_an_idle_connection_that_the_server_closed_loses_no_request() -> None:
    """Every connection is closed right after its first answer, without a word of it in the answer's head."""
    num_connections = 0
    event = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(event), event)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(2)
        writer.write(answer)
        writer.close()

    async def work() -> list[Outcome]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            load = Load(Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "/", {}))
            outcomes = []
            for _ in range(3):
                outcomes.append(await load.send(b"{}"))
                await asyncio.sleep(0.02)
            load.close()
        return outcomes

    assert [outcome.error for outcome in asyncio.run(work())] == ["", "", ""]
    assert num_connections == 3


def test_rejected_requests_are_outcomes() -> None:
    async def work(url: str) -> Outcome:
        load = Load(Target(url, "/v1/completions", {}))
        rejected = await load.send(b'{"prompt": 7, "stream": true}')
        load.close()
        return rejected

    with fake_server(FakeClient()) as url:
        assert asyncio.run(work(url)).error.startswith("HTTP 400: ")
    assert "FileNotFoundError" in asyncio.run(work("unix:/nowhere/socket")).error


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_bench_serve_prints_and_saves(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient("Hello!")
    words = f"--backend {backend} --num-prompts 6 --input-len 20 --output-len 4 --max-concurrency 2 --request-rate 500"
    words += " --ignore-eos --percentile-metrics ttft,e2el --metric-percentiles 50,99 --goodput ttft:10000"
    words += f" --save-result --save-detailed --result-dir {tmp_path} --metadata tag=night --disable-tqdm"
    with fake_server(client) as url:
        assert main(["bench", "serve", "--base-url", url, *words.split()]) == 0
    printed = capsys.readouterr().out
    assert "Successful requests                                6" in printed
    assert "P99 TTFT (ms)" in printed and "Request goodput (req/s)" in printed and "TPOT" not in printed
    (file,) = tmp_path.glob(f"{backend}-500qps-concurrency2-fake-*.json")
    saved = json.loads(file.read_text())
    assert saved["completed"] == 6 and saved["total_output_tokens"] == 24 and saved["tag"] == "night"
    assert saved["generated_texts"] == ["Hell"] * 6 and saved["max_concurrent_requests"] <= 2
    # One more request came first, with another prompt.
    assert len(client.requests) == 7
    assert all(request["params"].ignore_eos and request["params"].max_tokens == 4 for request in client.requests)
    assert len({request["prompt"]["prompt"] for request in client.requests}) == 7


def test_bench_serve_measures_embeddings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient(pooling=EMBED, hf_config={"hidden_size": 4})
    words = "--backend openai-embeddings --num-prompts 5 --input-len 20 --max-concurrency 2 --percentile-metrics e2el"
    words += f" --save-result --result-dir {tmp_path} --disable-tqdm"
    with fake_server(client) as url:
        assert main(["bench", "serve", "--base-url", url, *words.split()]) == 0
    assert "P99 E2EL (ms)" in capsys.readouterr().out
    (file,) = tmp_path.glob("openai-embeddings-*.json")
    saved = json.loads(file.read_text())
    assert (saved["completed"], saved["total_input_tokens"], saved["total_output_tokens"]) == (5, 100, 0)
    assert len(client.pooling_link.submits) == 6


def test_bench_serve_fails_loudly(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(FakeClient()) as url:
        # The fake engine takes 256 tokens.
        words = ["--base-url", url, "--num-prompts", "2", "--input-len", "300"]
        assert main(["bench", "serve", *words]) == 1
        assert "the prompt is too long" in capsys.readouterr().err
        assert main(["bench", "serve", "--base-url", url, "--model", "gpt-9", "--num-prompts", "1"]) == 1
        assert "--tokenizer DIR" in capsys.readouterr().err
    assert main(["bench", "serve", "--base-url", "unix:/nowhere/s", "--ready-check-timeout-sec", "0.6"]) == 1
    assert "no server answers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"), [("max-concurrency", "0"), ("input-len", "0"), ("output-len", "-1"), ("request-rate", "nan")]
)
def test_numbers_that_mean_nothing_are_rejected(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(FakeClient("Hello!")) as url:
        assert main(["bench", "serve", "--base-url", url, "--num-prompts", "1", f"--{flag}", value]) == 1
    assert f"--{flag}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--goodput", "tft:3"], "is not NAME:MS"),
        (["--goodput", "ttft:-1"], "must not be negative"),
        (["--goodput", "ttft:fast"], "is not a number of milliseconds"),
        (["--percentile-metrics", "ttft,speed"], "'speed' is not one of"),
        (["--metric-percentiles", "101"], "between 0 and 100"),
        (["--num-promts", "3"], "did you mean --num-prompts?"),
        (["word"], "unexpected argument 'word'"),
    ],
    ids=str,
)
def test_wrong_flags(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "serve", *words])
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_server_listens_after_its_socket_exists(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert not listens(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        assert path.exists() and not listens(path)
        server.listen()
        assert listens(path)
