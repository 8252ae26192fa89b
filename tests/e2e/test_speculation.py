"""Speculation in whole engines, beside their other features: the same tokens and logprob bits as without it."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import Server, serve
from waiting import until
from workloads import Ask, ask_all, ask_one_by_one

from octavo.core_proc.recorder import read_recording, replay
from octavo.frontend.cli import main
from octavo.frontend.cli.api import Api
from octavo.frontend.cli.bench.speculation import SpeculationMeter
from octavo.frontend.client import AsyncClient
from octavo.protocol.params import SamplingParams
from octavo.protocol.stats import EngineStats
from octavo.protocol.structured import StructuredOutputsParams

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 6}
NGRAM = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1}
ALWAYS = {**NGRAM, "adaptive": False}
"""Whether a draft is worth it depends on what steps cost: on a busy machine there may be none."""
FORM = StructuredOutputsParams(
    json={
        "type": "object",
        "properties": {"name": {"enum": ["ab", "ac"]}, "value": {"type": "boolean"}, "kind": {"const": "none"}},
        "required": ["name", "value", "kind"],
        "additionalProperties": False,
    }
)


def requests() -> list[Ask]:
    """Requests whose outputs repeat themselves, greedy and drawn, with penalties, logprobs and several sequences."""
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.2, n=3, seed=4, max_tokens=80, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.5, top_k=5, seed=5, max_tokens=80, ignore_eos=True, prompt_logprobs=1),
        SamplingParams(temperature=0.7, n=2, seed=7, max_tokens=80, logprobs=1, structured_outputs=FORM),
        SamplingParams(temperature=0.3, seed=6, presence_penalty=0.2, repetition_penalty=1.02, max_tokens=80),
    ]
    prompts = [tuple(range(5, 25)) * 3, (7, 8, 9, 10) * 16]
    return [Ask(prompt, params) for prompt in prompts for params in kinds]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[Any]]:
    """The answers of an engine that does not speculate."""

    async def run() -> list[list[Any]]:
        async with AsyncClient.launch(str(model), **SETTINGS) as client:
            return await ask_one_by_one(client, requests())

    return asyncio.run(run())


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"tensor_parallel_size": 2}, id="two ranks"),
        # Longer than the cache: requests are preempted and continue from host memory.
        pytest.param(
            {"num_gpu_blocks_override": 20, "kv_offloading_size": 0.01, "kv_offloading_recompute": False},
            id="host memory",
        ),
        pytest.param({"pipeline_parallel_size": 2}, id="two stages", marks=pytest.mark.long),
    ],
)
def test_answers_beside_other_features(
    model: Path, expected: list[list[Any]], settings: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "steps"
    common: dict[str, Any] = {**SETTINGS, "speculative_config": NGRAM, "record_steps": str(path)}

    async def run() -> EngineStats:
        async with AsyncClient.launch(str(model), **common, **settings) as client:
            for _ in range(2):  # the second time with prefixes from the cache
                assert await ask_all(client, requests()) == expected
            return await client.engine_stats()

    stats = asyncio.run(run())
    assert stats.spec_decode_num_accepted_tokens > 0
    assert stats.num_free_blocks == stats.num_blocks, "blocks were lost"
    # Depths depend on the times of steps, which are in the recording.
    replayed = replay(read_recording(path))
    assert replayed.is_identical and replayed.num_plans > 20
    if "kv_offloading_size" in settings:
        assert stats.num_preemptions > 0 and stats.external_prefix_cache_hits > 0


def test_a_core_dies_while_it_speculates(model: Path, expected: list[list[Any]]) -> None:
    async def run() -> None:
        async with AsyncClient.launch(str(model), **SETTINGS, speculative_config=ALWAYS) as client:
            answering = asyncio.create_task(ask_all(client, requests()))
            before = 0
            while not before:
                before = (await client.engine_stats()).spec_decode_num_drafts
            assert not answering.done(), "the requests were over before the core was killed"
            assert client.engine is not None
            os.kill(client.engine.core_pid, signal.SIGKILL)
            await until(lambda: not client.health().ok)
            assert await answering == expected
            assert (await client.engine_stats()).spec_decode_num_drafts > 0, "the new core did not speculate"

    asyncio.run(run())


@pytest.fixture(scope="module")
def speculating_server(model: Path) -> Iterator[Server]:
    flags = ("--dtype", "float32", "--max-model-len", "256", "--speculative-config", json.dumps(ALWAYS))
    with serve(model, *flags, "--served-model-name", "tiny") as server:
        yield server.wait_until_ready()


def test_http_answers_with_and_without_drafts_are_equal(speculating_server: Server) -> None:
    body = {
        "model": "tiny", "prompt": list(range(5, 25)) * 3, "max_tokens": 60, "temperature": 0.3, "seed": 3, "n": 3,
        "logprobs": 2, "frequency_penalty": 0.05, "ignore_eos": True,
        "allowed_token_ids": [5, 6, 7],
    }  # fmt: skip
    plain, speculated = (
        speculating_server.post("/v1/completions", body | {"speculation": depth}).json()["choices"]
        for depth in ("off", 6)
    )
    assert speculated == plain and len(speculated) == 3
    assert sum(SpeculationMeter(Api(speculating_server.url)).figures()["spec_decode_per_position_acceptance_rates"]) > 0


def test_bench_serve_reports_what_was_accepted(
    speculating_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--num-prompts", "4", "--input-len", "24", "--output-len", "60", "--ignore-eos", "--disable-tqdm"]
    # All drafts are right.
    words += ["--extra-body", '{"allowed_token_ids": [5]}']
    out = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "out.json"]
    assert main(["bench", "serve", "--base-url", speculating_server.url, *words, *out]) == 0
    printed, saved = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    assert "Speculative decoding" in printed and "Position 0: acceptance (%)" in printed
    accepted, drafts = saved["spec_decode_accepted_tokens"], saved["spec_decode_num_drafts"]
    assert 0 < accepted <= saved["spec_decode_draft_tokens"] and drafts > 0
    assert saved["spec_decode_acceptance_length"] == 1 + accepted / drafts
    rates = saved["spec_decode_per_position_acceptance_rates"]
    assert sum(rates) * drafts == pytest.approx(accepted) and rates == sorted(rates, reverse=True)
