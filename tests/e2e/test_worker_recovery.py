"""A worker is killed or stopped while requests run: answers equal those of an undisturbed run, bit for bit."""

import asyncio
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_kills import fork_server_of, worker_of
from tiny_heads import make_head
from tiny_models import make_tiny
from waiting import until
from workloads import Ask, ask, ask_all, random_requests

from octavo import LLM, AsyncClient, SamplingParams, StructuredOutputsParams
from octavo.protocol.stats import EngineStats

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 6}
LONG = SamplingParams(max_tokens=200, seed=1, ignore_eos=True, logprobs=1)


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CHECK", "1")


def storm_requests() -> list[Ask]:
    """Random requests, and some of each kind that a loss of the workers could harm."""
    schema = StructuredOutputsParams(json='{"type": "array", "items": {"type": "integer"}, "minItems": 30}')
    special = [
        SamplingParams(n=2, best_of=4, max_tokens=60, seed=5, ignore_eos=True),
        SamplingParams(max_tokens=120, seed=6, structured_outputs=schema, logprobs=2),
        SamplingParams(max_tokens=120, temperature=0.0, structured_outputs=StructuredOutputsParams(regex="(ab|c)+")),
        SamplingParams(max_tokens=150, temperature=0.0, repetition_penalty=1.1, logprobs=3, prompt_logprobs=1),
        LONG,
    ]
    return [*random_requests(seed=11, count=30, vocab_size=100), *(Ask((9, 8, 7), params) for params in special * 2)]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[Any]]:
    """Return what the requests of the storm give on an engine whose worker lives."""

    async def main() -> list[list[Any]]:
        async with AsyncClient.connect(llm.client.address) as client:
            return await ask_all(client, storm_requests())

    return asyncio.run(main())


FORK_SERVER = -1
"""In place of a rank."""


async def wait_for_progress(client: AsyncClient) -> None:
    """Wait until every request that may have run on the workers which were just lost has got past that place.

    Who kills twice in between makes a request look guilty (docs/stress.md). Two steps may have been in flight.
    """
    lost = (await client.snapshot()).requests
    ran = [one for place, one in enumerate(lost) if place < SETTINGS["max_num_seqs"] or one.num_output_tokens]
    places = {one.request_id: one.num_output_tokens + 2 for one in ran}

    async def have_progressed() -> bool:
        requests = (await client.snapshot()).requests  # without those that have ended
        return all(one.num_output_tokens >= places.get(one.request_id, 0) for one in requests)

    await until(have_progressed)


async def until_stats(client: AsyncClient, condition: Callable[[EngineStats], object]) -> None:
    async def is_so() -> bool:
        return bool(condition(await client.engine_stats()))

    await until(is_so, lambda: client.health())


async def strike_at_random(
    client: AsyncClient, number: signal.Signals, rng: random.Random, num_strikes: int, rank: int
) -> None:
    """Send a signal to the process of the moment, each time when it computes and has got further than the last one."""
    for num_losses in range(num_strikes):
        before = (await client.engine_stats()).num_steps
        await until_stats(client, lambda stats, before=before: stats.num_steps != before)
        await asyncio.sleep(rng.choice([0.0, 0.02, 0.1]))
        os.kill(fork_server_of(client) if rank == FORK_SERVER else worker_of(client, rank), number)
        await until_stats(client, lambda stats, seen=num_losses: sum(stats.worker_failures.values()) != seen)
        await wait_for_progress(client)


@pytest.mark.parametrize(
    ("number", "cause", "seed", "size", "num_stages", "num_strikes", "rank"),
    [
        pytest.param(signal.SIGKILL, "exited", 1, 1, 1, 3, 0, id="killed"),
        pytest.param(signal.SIGKILL, "exited", 2, 1, 1, 3, 0, id="killed again", marks=pytest.mark.long),
        pytest.param(signal.SIGSTOP, "hung", 3, 1, 1, 3, 0, id="stopped", marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, "exited", 4, 2, 1, 3, 1, id="one of two ranks killed", marks=pytest.mark.long),
        pytest.param(signal.SIGSTOP, "hung", 5, 2, 1, 3, 1, id="one of two ranks stopped"),
        pytest.param(
            signal.SIGKILL, "exited", 9, 2, 1, 2, FORK_SERVER, id="fork server killed", marks=pytest.mark.long
        ),
        pytest.param(signal.SIGKILL, "exited", 6, 1, 2, 1, 1, id="one of two stages killed"),
        pytest.param(signal.SIGSTOP, "hung", 7, 1, 2, 3, 1, id="one of two stages stopped", marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, "exited", 8, 2, 2, 3, 3, id="one of two by two killed", marks=pytest.mark.long),
    ],
)
def test_a_storm_over_dying_workers(
    model: Path,
    expected: list[list[Any]],
    number: signal.Signals,
    cause: str,
    seed: int,
    size: int,
    num_stages: int,
    num_strikes: int,
    rank: int,
) -> None:
    """The expected answers are those of one rank, whatever the sizes."""
    sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": num_stages}
    storm_over_dying_workers(model, expected, sizes, number, cause, seed, num_strikes, rank)


@pytest.mark.parametrize("method", ["eagle", pytest.param("draft_model", marks=pytest.mark.long)])
def test_a_storm_over_a_dying_rank_that_drafts(
    model: Path, expected: list[list[Any]], tmp_path: Path, method: str
) -> None:
    draft = tmp_path / "draft"
    if method == "eagle":
        make_head("eagle", draft)
    else:
        make_tiny("Qwen2ForCausalLM", draft, hidden_size=64, seed=1)
    speculation = {"method": method, "model": str(draft), "adaptive": False}
    settings = {"tensor_parallel_size": 2, "speculative_config": speculation}
    stats = storm_over_dying_workers(model, expected, settings, signal.SIGKILL, "exited", 3, 1, 1)
    assert stats.spec_decode_num_draft_tokens > 0


def storm_over_dying_workers(
    model: Path,
    expected: list[list[Any]],
    sizes: dict[str, Any],
    number: signal.Signals,
    cause: str,
    seed: int,
    num_strikes: int,
    rank: int,
) -> EngineStats:
    requests = storm_requests()
    settings = {**SETTINGS, "execute_model_timeout": 2.0, **sizes}

    async def main() -> EngineStats:
        async with AsyncClient.launch(str(model), **settings) as client:
            rng = random.Random(seed)
            striking = asyncio.create_task(strike_at_random(client, number, rng, num_strikes, rank))
            results = await ask_all(client, requests)
            striking.cancel()
            await asyncio.gather(striking, return_exceptions=True)
            for request, got, want in zip(requests, results, expected, strict=True):
                assert got == want, request
            stats = await client.engine_stats()
            assert stats.worker_failures[cause] >= 1, "the storm was over before the first strike"
            assert stats.requests_resumed >= 1
            assert stats.num_free_blocks == stats.num_blocks, "blocks were lost"
            assert stats.num_running == stats.num_waiting == 0
            return stats

    return asyncio.run(main())


@pytest.mark.parametrize("cache", [{}, {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}], ids=str)
def test_a_worker_that_dies_during_the_first_prompt(model: Path, cache: dict[str, Any]) -> None:
    """Nothing was delivered yet: not even the prompt's logprobs may come twice, or be lost. Another worker measures the
    same scales of the cache."""

    async def main() -> None:
        request = Ask(tuple(range(5, 95)), SamplingParams(max_tokens=30, seed=1, prompt_logprobs=2, logprobs=2))
        settings = {**SETTINGS, "max_num_batched_tokens": 16, **cache}
        async with AsyncClient.launch(str(model), **settings) as client:
            alone = await ask(client, request)
            os.kill(worker_of(client), signal.SIGSTOP)
            asking = asyncio.create_task(ask(client, request))
            await until_stats(client, lambda stats: stats.num_running)
            os.kill(worker_of(client), signal.SIGKILL)
            assert await asking == alone

    asyncio.run(main())
