"""The core is killed repeatedly while requests run: answers equal those of an undisturbed run, bit for bit."""

import asyncio
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from slow_steps import PLUGIN, SLOW
from tiny_models import make_tiny
from waiting import TIMEOUT_S, until
from workloads import Ask, ask, ask_all, bits, fingerprint, logprob_bits, random_requests

from octavo.frontend.client import AsyncClient
from octavo.frontend.engine_connection import RECONNECT_TIMEOUT_S
from octavo.frontend.recovery import engine_supervisor
from octavo.protocol import restarts
from octavo.protocol.config.sources import engine_config
from octavo.protocol.errors import EngineDeadError, RequestFailedError, StartupError
from octavo.protocol.params import BeamSearchParams, OutputKind, SamplingParams

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 6}
LONG = SamplingParams(max_tokens=200, seed=1, ignore_eos=True, logprobs=1)


async def ask_streamed(client: AsyncClient, request: Ask) -> list[Any]:
    """Send one request, put its deltas together, and return the fingerprint of the whole."""
    if request.params.best_of is not None:  # which are the best is known at the end
        return await ask(client, request)
    texts: dict[int, str] = {}
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[Any]] = {}
    ends: dict[int, tuple[Any, ...]] = {}
    prompt_logprobs = None
    await asyncio.sleep(request.delay_s)
    async for output in client.generate(list(request.prompt), request.params.clone(output_kind=OutputKind.DELTA)):
        if output.prompt_logprobs is not None:
            assert prompt_logprobs is None, "prompt logprobs came twice"
            prompt_logprobs = output.prompt_logprobs
        for sequence in output.outputs:
            texts[sequence.index] = texts.get(sequence.index, "") + sequence.text
            tokens.setdefault(sequence.index, []).extend(sequence.token_ids)
            logprobs.setdefault(sequence.index, []).extend(sequence.logprobs or [])
            ends[sequence.index] = (sequence.finish_reason, sequence.stop_reason, bits(sequence.cumulative_logprob))
    has_logprobs = request.params.logprobs is not None
    sequences = [
        (tokens[index], texts[index], *ends[index], logprob_bits(logprobs[index]) if has_logprobs else None)
        for index in sorted(tokens)
    ]
    return [sequences, logprob_bits(prompt_logprobs)]


def storm_requests() -> list[Ask]:
    """Random requests, and some of each kind that a restart could harm."""
    special = [
        SamplingParams(n=2, best_of=4, max_tokens=60, seed=5, ignore_eos=True),
        SamplingParams(max_tokens=150, seed=6, stop=["zz", "qq"], ignore_eos=True, min_tokens=20),
        SamplingParams(max_tokens=150, temperature=0.0, repetition_penalty=1.1, logprobs=3, prompt_logprobs=1),
        LONG,
    ]
    return [*random_requests(seed=3, count=40, vocab_size=100), *(Ask((9, 8, 7), params) for params in special * 2)]


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def client(model: Path, runner: asyncio.Runner) -> Iterator[AsyncClient]:
    """An engine that survives several tests, and so more deaths than any of them causes."""

    async def launch() -> AsyncClient:
        return await AsyncClient.launch(str(model), **SETTINGS)

    client = runner.run(launch())
    yield client
    runner.run(client.close())


@pytest.fixture(scope="module")
def expected(client: AsyncClient, runner: asyncio.Runner) -> list[list[Any]]:
    """What the requests of the storm give while nothing dies."""
    return runner.run(ask_all(client, storm_requests()))


def kill_core(client: AsyncClient) -> None:
    assert client.engine is not None
    os.kill(client.engine.core_pid, signal.SIGKILL)


async def kill_at_random(client: AsyncClient, rng: random.Random, num_kills: int) -> int:
    """Kill the core as often as asked, each time when it has work; return how often it still had."""
    num_hits = 0
    for _ in range(num_kills):
        await until(lambda: client.health().ok and client.num_live_requests)
        await asyncio.sleep(rng.choice([0.02, 0.1, 0.3]))
        num_hits += client.num_live_requests > 0
        kill_core(client)
        await until(lambda: not client.health().ok)
    return num_hits


def difference(requests: list[Ask], got: list[list[Any]], want: list[list[Any]]) -> str:
    return "\n".join(f"{r}\n  {g}\n  {w}" for r, g, w in zip(requests, got, want, strict=True) if g != w)


def test_a_storm_over_dying_cores(client: AsyncClient, expected: list[list[Any]], runner: asyncio.Runner) -> None:
    """Two frontends, one that has the engine and one that has joined it; each streams half of its requests."""
    requests = storm_requests()

    async def main() -> None:
        async with AsyncClient.connect(client.address) as joined:
            killing = asyncio.create_task(kill_at_random(client, random.Random(4), num_kills=2))
            owner_asks = [(ask, ask_streamed)[number % 2](client, one) for number, one in enumerate(requests)]
            joined_asks = [(ask_streamed, ask)[number % 2](joined, one) for number, one in enumerate(requests)]
            results = await asyncio.gather(*owner_asks, *joined_asks)
            assert await killing >= 1, "the storm was over before the first kill"
            for got in (results[: len(requests)], results[len(requests) :]):
                assert got == expected, difference(requests, got, expected)
            stats = await client.engine_stats()
            assert stats.num_free_blocks == stats.num_blocks, "blocks were lost"
            assert stats.num_running == stats.num_waiting == 0

    runner.run(main())


def test_a_beam_search_continues_after_a_restart_of_the_core(client: AsyncClient, runner: asyncio.Runner) -> None:
    async def main() -> None:
        params = BeamSearchParams(beam_width=4, max_tokens=120, ignore_eos=True)
        alone = fingerprint(await client.beam_search([5, 6, 7], params))
        searching = asyncio.create_task(client.beam_search([5, 6, 7], params))
        await asyncio.sleep(0.05)
        kill_core(client)
        assert fingerprint(await searching) == alone

    runner.run(main())


def test_usage_is_counted_once(model: Path) -> None:
    """Cached tokens are those of the first run; nothing is generated twice for the caller."""

    async def main() -> None:
        async with AsyncClient.launch(str(model), **SETTINGS, logits_processors=[PLUGIN]) as client:
            prompt = list(range(5, 70))
            await ask(client, Ask(tuple(prompt), SamplingParams(max_tokens=1)))
            seen: list[int] = []
            async for output in client.generate(prompt, LONG.clone(max_tokens=50, extra_args=SLOW)):
                if not seen:
                    kill_core(client)
                seen += output.outputs[0].token_ids
            assert len(seen) == 50
            assert output.num_cached_tokens == 64
            assert output.num_preemptions == 1

    asyncio.run(main())


def test_aborts_and_newcomers_while_there_is_no_core(client: AsyncClient, runner: asyncio.Runner) -> None:
    async def main() -> None:
        first = client.generate([5, 6, 7], LONG, request_id="leaves")
        await anext(first)
        kill_core(client)
        await until(lambda: not client.health().ok)
        assert "is restarting" in client.health().reason
        newcomer = asyncio.create_task(ask(client, Ask((5, 6, 7), LONG)))
        await first.aclose()
        again = await ask(client, Ask((5, 6, 7), LONG))
        assert await newcomer == again
        assert client.health().ok
        assert client.num_live_requests == 0

    runner.run(main())


def test_a_core_that_is_stopped_is_replaced(model: Path) -> None:
    async def main() -> None:
        async with AsyncClient.launch(str(model), **SETTINGS, core_timeout=2) as client:
            alone = await ask(client, Ask((5, 6, 7), LONG))
            assert client.engine is not None
            stopped = client.engine.core_pid
            os.kill(stopped, signal.SIGSTOP)
            assert await ask(client, Ask((5, 6, 7), LONG)) == alone
            assert client.engine.core_pid != stopped

    asyncio.run(main())


def test_a_joined_client_fails_with_the_root_cause_if_no_engine_comes_back(model: Path) -> None:
    async def main() -> None:
        async with (
            AsyncClient.launch(str(model), **SETTINGS, logits_processors=[PLUGIN]) as owner,
            AsyncClient.connect(owner.address, reconnect_timeout_s=0.3) as joined,
        ):
            outputs = joined.generate([5, 6, 7], LONG.clone(extra_args=SLOW))
            await anext(outputs)
            assert owner.engine is not None
            owner.engine.watch(lambda exited: None)  # nobody starts another
            kill_core(owner)
            with pytest.raises(EngineDeadError, match="gone"):
                async with asyncio.timeout(RECONNECT_TIMEOUT_S / 2):  # half of what it would be without the setting
                    async for _ in outputs:
                        pass

    asyncio.run(main())


NEIGHBOUR = """
import asyncio, sys
from octavo import AsyncClient, SamplingParams

async def main():
    async with AsyncClient.connect(sys.argv[1]) as client:
        params = SamplingParams(n=3, max_tokens=240, ignore_eos=True)
        while True:
            async for _ in client.generate([1, 2, 3], params):
                print("token", flush=True)

asyncio.run(main())
"""


def test_a_frontend_that_dies_is_noticed_by_the_core_alone(client: AsyncClient, runner: asyncio.Runner) -> None:
    async def has_all_blocks() -> bool:
        stats = await client.engine_stats()
        return stats.num_free_blocks == stats.num_blocks

    async def main() -> None:
        alone = await ask(client, Ask((5, 6, 7), LONG))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-c", NEIGHBOUR, client.address, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S)
            asking = asyncio.create_task(ask(client, Ask((5, 6, 7), LONG)))
        finally:
            process.kill()
        assert await asking == alone
        await until(has_all_blocks)
        await process.wait()

    runner.run(main())


def test_a_planned_restart_goes_unnoticed(model: Path) -> None:
    """New flags take over under load, also for those who have joined; what cannot start changes nothing."""

    async def main() -> None:
        given = engine_config({"model": str(model), **SETTINGS})
        async with AsyncClient.launch(config=given) as owner, AsyncClient.connect(owner.address) as joined:
            alone = await ask(owner, Ask((5, 6, 7), LONG))
            for change in ({"max_num_seqs": 3, "block_size": 32}, {"max_num_seqs": 6}):
                assert owner.engine is not None
                before = owner.engine.core_pid
                restarting = asyncio.create_task(
                    owner.restart(engine_config({"model": str(model), **SETTINGS, **change}))
                )
                results = []
                while not restarting.done():
                    results += await asyncio.gather(*(ask(client, Ask((5, 6, 7), LONG)) for client in (owner, joined)))
                await restarting
                assert all(result == alone for result in results)
                assert await ask(joined, Ask((5, 6, 7), LONG)) == alone
                assert owner.config.max_num_seqs == joined.config.max_num_seqs == change["max_num_seqs"]
                assert owner.engine.core_pid != before
            with pytest.raises(StartupError, match="KV blocks"):
                await owner.restart(engine_config({"model": str(model), **SETTINGS, "kv_cache_memory_bytes": 4096}))
            assert await ask(owner, Ask((5, 6, 7), LONG)) == alone
            kill_core(owner)
            assert await ask(joined, Ask((5, 6, 7), LONG)) == alone
            async with AsyncClient.connect(owner.address) as late:
                assert await ask(late, Ask((5, 6, 7), LONG)) == alone

    asyncio.run(main())


POISON_LENGTH = 33
"""Prompt tokens of the request that kills."""


async def kill_for_poison(client: AsyncClient, everybody: list[AsyncClient]) -> int:
    """Kill the core whenever the request of `POISON_LENGTH` runs, until none is there; return how often that was."""
    num_kills = 0
    while any(one.num_live_requests for one in everybody):
        requests = (await client.snapshot()).requests
        if any(request.num_prompt_tokens == POISON_LENGTH and request.num_computed_tokens for request in requests):
            num_kills += 1
            kill_core(client)
            await until(lambda: not client.health().ok)
        await asyncio.sleep(0.005)
    return num_kills


@pytest.mark.parametrize("num_frontends", [pytest.param(1, marks=pytest.mark.long), 3])
def test_a_request_that_kills_fails_alone(model: Path, num_frontends: int) -> None:
    """Also where others ask the same core, one of them for a single request."""

    async def main() -> None:
        requests = [Ask((5, 6, 7, number), LONG) for number in range(6)]
        poison = Ask(tuple(range(POISON_LENGTH)), LONG.clone(extra_args=SLOW))
        launched = AsyncClient.launch(str(model), **SETTINGS, logits_processors=[PLUGIN])
        async with launched as client, AsyncExitStack() as stack:
            joined = [AsyncClient.connect(client.address) for _ in range(num_frontends - 1)]
            everybody = [client, *[await stack.enter_async_context(one) for one in joined]]
            alone = await ask_all(client, requests)
            by = [client] * (len(requests) - len(joined)) + everybody[1:]
            asks = zip([*by, everybody[-1]], [*requests, poison], strict=True)
            asking = asyncio.gather(*(ask(one, request) for one, request in asks), return_exceptions=True)
            await asyncio.sleep(0)
            killing = asyncio.create_task(kill_for_poison(client, everybody))
            *results, failure = await asking
            assert results == alone
            assert isinstance(failure, RequestFailedError)
            assert "SIGKILL" in str(failure)
            assert await killing <= 8
            assert client.health().ok

    asyncio.run(main())


def test_an_engine_that_cannot_start_again_is_dead_with_the_first_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_supervisor, "RestartPolicy", lambda: restarts.RestartPolicy(max_restarts=2))
    model = make_tiny("LlamaForCausalLM", tmp_path / "model")

    async def main() -> None:
        async with AsyncClient.launch(str(model), **SETTINGS, packed_weights_cache_bytes=0) as client:
            for weights in model.glob("*.safetensors"):
                weights.unlink()
            asks = [asyncio.create_task(ask(client, Ask((5, 6, 7), LONG))) for _ in range(3)]
            await until(lambda: client.num_live_requests >= 3)
            kill_core(client)
            for end in await asyncio.gather(*asks, return_exceptions=True):
                assert isinstance(end, EngineDeadError)
                assert "core was killed by SIGKILL (and 2 restarts after it failed)" in str(end), "no last symptom"
            assert "SIGKILL" in client.health().reason
            with pytest.raises(EngineDeadError):
                await ask(client, Ask((5, 6, 7), LONG))

    asyncio.run(main())
