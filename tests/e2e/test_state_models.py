"""Models with recurrent states in whole engines: checkpoints, equal prompts, and the loss of workers and cores."""

import asyncio
import os
import random
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from connector_fakes import documented_connector
from engine_kills import worker_of
from servers import descendants
from tiny_families import FAMILIES
from tiny_models import make_tiny
from waiting import until
from workloads import Ask, ask, ask_all, ask_one_by_one

from octavo import LLM, AsyncClient, SamplingParams
from octavo.frontend.model_files.facts import read_model_facts
from octavo.protocol.config import ModelConfig
from octavo.protocol.config.division import division_problem
from octavo.protocol.env import Env
from octavo.worker_proc.models.registry import ARCHITECTURES

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 6}
ALONE = {**SETTINGS, "max_num_seqs": 1, "async_scheduling": False, "enable_prefix_caching": False}
WITH_STATES = [name for name, (arch, _, _) in FAMILIES.items() if "state" in ARCHITECTURES[arch].caches]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


def tiny(name: str, root: Path) -> Path:
    arch, class_name, settings = FAMILIES[name]
    path = root / name
    return path if path.exists() else make_tiny(arch, path, class_name=class_name, **settings)


def storm_requests() -> list[Ask]:
    """Requests with common starts, some of them equal, with several sequences, and long enough for checkpoints."""
    rng = random.Random(4)
    common = [rng.randrange(3, 300) for _ in range(560)]
    requests = []
    for number in range(24):
        prompt = [*common[: rng.choice([0, 130, 300, 560])], *(rng.randrange(3, 300) for _ in range(rng.randrange(40)))]
        num_sequences = rng.choice([1, 1, 1, 3])
        params = SamplingParams(
            n=num_sequences,
            max_tokens=rng.choice([1, 20, 120, 300]),
            seed=number,
            temperature=rng.choice([0.0, 1.0]) if num_sequences == 1 else 0.8,
            logprobs=2,
            ignore_eos=True,
        )
        requests += [Ask((7, *prompt), params)] * rng.choice([1, 1, 2])
    return requests


async def num_losses(client: AsyncClient) -> int:
    return sum((await client.engine_stats()).worker_failures.values())


async def kill_worker(client: AsyncClient, rank: int) -> None:
    """Returns when the core has noticed: requests that begin now find nothing that the worker had."""
    before = await num_losses(client)

    async def is_noticed() -> bool:
        return await num_losses(client) > before

    os.kill(worker_of(client, rank), signal.SIGKILL)
    await until(is_noticed)


async def strike(client: AsyncClient, victim: int) -> None:
    """Kill the core (0) or the worker (1) while steps run, and wait for what follows."""
    before = (await client.engine_stats()).num_steps

    async def has_run() -> bool:
        return (await client.engine_stats()).num_steps > before + 20

    await until(has_run)
    assert client.engine is not None
    os.kill(worker_of(client) if victim else client.engine.core_pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("name", WITH_STATES)
def test_storms_and_lost_processes_change_no_bit(name: str, root: Path) -> None:
    path, requests = str(tiny(name, root)), storm_requests()

    async def alone() -> list[Any]:
        async with AsyncClient.launch(path, **ALONE) as client:
            return await ask_one_by_one(client, requests)

    async def together(victims: list[int], **settings: Any) -> tuple[list[Any], Any]:
        async with AsyncClient.launch(path, **{**SETTINGS, **settings}) as client:
            asking = asyncio.create_task(ask_all(client, requests))
            for victim in victims:
                await strike(client, victim)
            results = await asking
            stats = await client.engine_stats()
            assert stats.num_free_blocks == stats.num_blocks, "slots were lost"
            return results, stats

    expected = asyncio.run(alone())
    storms: list[tuple[list[int], dict[str, Any]]] = [
        ([], {}),
        ([], {"max_num_batched_tokens": 70, "block_size": 8}),
        ([1, 0, 1], {"max_num_batched_tokens": 128}),
        ([], {"pipeline_parallel_size": 2}),
        ([1, 0], {"max_num_seqs": 2, "kv_offloading_size": 0.1, "kv_offloading_recompute": False}),
    ]
    if not division_problem(read_model_facts(ModelConfig(model=path), Env.read()), 2):
        storms.append(([1], {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}))
    for victims, settings in storms:
        results, stats = asyncio.run(together(victims, **settings))
        for request, got, want in zip(requests, results, expected, strict=True):
            assert got == want, (settings, request)
        assert stats.prefix_cache_hits > 0 or victims


def test_a_rank_that_dies_changes_no_token(root: Path) -> None:
    """Two ranks, against one worker."""
    path, requests = str(tiny("granite-hybrid-dense", root)), storm_requests()[:4]

    async def alone() -> list[Any]:
        async with AsyncClient.launch(path, **ALONE) as client:
            return await ask_one_by_one(client, requests)

    async def together() -> list[Any]:
        settings = {**SETTINGS, "tensor_parallel_size": 2, "max_num_batched_tokens": 128}
        async with AsyncClient.launch(path, **settings) as client:
            asking = asyncio.create_task(ask_all(client, requests))
            await strike(client, 1)
            return await asking

    assert asyncio.run(together()) == asyncio.run(alone())


def test_equal_prompts_are_computed_once(root: Path) -> None:
    prompt = tuple(range(5, 305))
    several = Ask(prompt, SamplingParams(n=4, max_tokens=4, temperature=1.0, seed=1, logprobs=1))

    async def main() -> None:
        async with AsyncClient.launch(str(tiny("mamba2", root)), **SETTINGS) as client:
            first = await ask(client, several)
            stats = await client.engine_stats()
            # The first sequence computes all of it, and the others the tokens after the last checkpoint.
            assert stats.prefix_cache_hits == 3 * 256
            assert await ask(client, several) == first

    asyncio.run(main())


@pytest.mark.parametrize("name", ["mamba2", "granite-hybrid-dense"])
def test_plans_of_several_steps_leave_the_checkpoints_of_single_steps(name: str, root: Path) -> None:
    prompt = [*range(5, 25)]
    params = SamplingParams(max_tokens=300, temperature=1.0, seed=1, logprobs=1, ignore_eos=True)
    turns = list[list[Any]]()
    for num_steps in (1, 8):
        with LLM(str(tiny(name, root)), **SETTINGS, num_scheduler_steps=num_steps) as llm:
            (first,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            longer = [*prompt, *first.outputs[0].token_ids]
            (second,) = llm.generate([{"prompt_token_ids": longer}], params, use_tqdm=False)
            assert second.num_cached_tokens == 256
        turns.append([(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in (first, second)])
    assert turns[0] == turns[1]


TWO_RANKS, TWO_STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        pytest.param("mamba2", TWO_STAGES, id="mamba2, two stages"),
        pytest.param("granite-hybrid-dense", TWO_RANKS, id="hybrid, two ranks", marks=pytest.mark.long),
        pytest.param("granite-hybrid-dense", {}, id="hybrid", marks=pytest.mark.long),
    ],
)
def test_checkpoints_come_back_from_host_memory(name: str, workers: dict[str, int], root: Path) -> None:
    """The four slots of one request hold no checkpoint of the first prompts; a worker that dies loses all of them."""
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=1, logprobs=1, ignore_eos=True)
    prompts = [Ask((*range(5 + first, 305 + first),), params) for first in range(5)]
    path, offloading = str(tiny(name, root)), {"kv_offloading_size": 0.1, "kv_offloading_recompute": False}

    async def alone() -> list[Any]:
        async with AsyncClient.launch(path, **ALONE) as client:
            return await ask_one_by_one(client, prompts)

    async def in_turn() -> list[Any]:
        async with AsyncClient.launch(path, **{**SETTINGS, "max_num_seqs": 1}, **offloading, **workers) as client:
            results, num_hits = [], 0
            for is_new in (True, False, True, False):
                results.append(await ask_one_by_one(client, prompts))
                stats = await client.engine_stats()
                num_loaded, num_hits = stats.external_prefix_cache_hits - num_hits, stats.external_prefix_cache_hits
                assert num_loaded == (0 if is_new else 5 * 256)
                if not is_new:
                    await kill_worker(client, rank=len(workers))
            return results

    assert asyncio.run(in_turn()) == [asyncio.run(alone())] * 4


@pytest.mark.parametrize(
    ("name", "is_connector", "workers"),
    [
        pytest.param("granite-hybrid-dense", False, TWO_RANKS, id="hybrid, two ranks"),
        pytest.param("granite-hybrid-dense", False, TWO_STAGES, id="hybrid, two stages", marks=pytest.mark.long),
        pytest.param("granite-hybrid-dense", True, TWO_RANKS, id="hybrid, connector", marks=pytest.mark.long),
        pytest.param("mamba2", False, {}, id="mamba2", marks=pytest.mark.long),
        pytest.param("mamba2", True, TWO_STAGES, id="mamba2, connector", marks=pytest.mark.long),
    ],
)
def test_checkpoints_come_back_from_files(
    name: str, is_connector: bool, workers: dict[str, int], root: Path, tmp_path: Path
) -> None:
    """After a worker died, after a restart, and as far as no file of the last rank is torn."""
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=1, logprobs=1, ignore_eos=True)
    prompts = [Ask((*range(5 + first, 305 + first),), params) for first in range(3)]
    path, files = str(tiny(name, root)), {"kv_offloading_path": str(tmp_path), "kv_offloading_recompute": False}
    if is_connector:
        files |= {"kv_offloading_path": "", "kv_transfer_config": documented_connector(tmp_path)}

    async def alone() -> list[Any]:
        async with AsyncClient.launch(path, **ALONE) as client:
            return await ask_one_by_one(client, prompts)

    async def ask_each(client: AsyncClient) -> int:
        """Return how many tokens came from files."""
        before = (await client.engine_stats()).external_prefix_cache_hits
        assert await ask_one_by_one(client, prompts) == expected
        return (await client.engine_stats()).external_prefix_cache_hits - before

    async def with_files(*, dies: bool) -> int:
        async with AsyncClient.launch(path, **{**SETTINGS, "max_num_seqs": 2}, **files, **workers) as client:

            async def are_all_in_files() -> bool:
                # What the worker has not written when it dies is computed again.
                return await client.reset_prefix_cache() and await ask_each(client) == 3 * 256

            num_found = await ask_each(client)
            if dies:
                await until(are_all_in_files)
                await kill_worker(client, rank)
                num_found = await ask_each(client)
            return num_found

    expected, rank = asyncio.run(alone()), len(workers)
    assert asyncio.run(with_files(dies=True)) == 3 * 256
    assert asyncio.run(with_files(dies=False)) == 3 * 256
    packs = [*tmp_path.glob(f"*/*/{rank}/*/*"), *(tmp_path / "blocks").rglob(f"*-{rank}")]
    assert packs
    for pack in packs:
        os.truncate(pack, pack.stat().st_size - 1)
    assert asyncio.run(with_files(dies=False)) == 0


def test_a_decode_engine_continues_from_the_state_of_a_prefill_engine(root: Path) -> None:
    """A hybrid over shared memory, and over tcp; nothing is lost if the engine that gives dies."""
    path, prompt = str(tiny("granite-hybrid-dense", root)), [*range(5, 305)]
    both = {"kv_connector": "OctavoConnector"}
    with ExitStack() as stack:
        giver, remote, taker = (
            stack.enter_context(LLM(path, **SETTINGS, kv_transfer_config={**both, **role}))
            for role in (
                {"kv_role": "kv_producer"},
                {"kv_role": "kv_producer", "kv_ip": "127.0.0.1"},
                {"kv_role": "kv_consumer"},
            )
        )

        def prefill(llm: LLM) -> dict[str, Any]:
            leave = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
            (output,) = llm.generate([{"prompt_token_ids": prompt}], leave, use_tqdm=False)
            assert output.kv_transfer_params and output.kv_transfer_params["remote_num_tokens"] == 256
            return output.kv_transfer_params

        def decode(transfer: dict[str, Any] | None) -> tuple[Any, int]:
            taker.reset_prefix_cache()
            params = SamplingParams(
                max_tokens=16, temperature=1.0, seed=5, ignore_eos=True, logprobs=2,
                extra_args=transfer and {"kv_transfer_params": transfer},
            )  # fmt: skip
            (output,) = taker.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            assert output.outputs[0].logprobs is not None
            values = [[one.logprob for one in place.values()] for place in output.outputs[0].logprobs]
            return (list(output.outputs[0].token_ids), values), output.num_cached_tokens or 0

        expected, num_cached = decode(None)
        assert num_cached == 0
        assert decode(prefill(giver)) == (expected, 256)
        assert decode(prefill(remote)) == (expected, 256)
        transfer = prefill(giver)
        assert giver.client.engine is not None
        os.kill(giver.client.engine.core_pid, signal.SIGKILL)
        assert decode(transfer) == (expected, 0), "it is computed"
        transfer = prefill(remote)
        assert taker.client.engine is not None
        os.kill(max(descendants(taker.client.engine.core_pid)), signal.SIGKILL)
        assert decode(transfer)[0] == expected


@pytest.mark.parametrize("name", ["mamba2", "granite-hybrid-dense"])
def test_states_go_back_to_before_wrong_drafts(name: str, root: Path) -> None:
    """Answers with drafts, while the worker dies, against those without; the second one has attention too."""
    path = str(tiny(name, root))
    # With few tokens to choose from, an output repeats itself, but not always.
    common: dict[str, Any] = {"n": 2, "max_tokens": 80, "seed": 4, "logprobs": 1, "allowed_token_ids": [5, 6]}
    requests = [
        Ask((*range(5, 25),) * 2, SamplingParams(temperature=temperature, ignore_eos=True, **common))
        for temperature in (0.1, 0.2, 0.5)
    ]
    speculation = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1, "adaptive": False}

    async def alone() -> list[Any]:
        async with AsyncClient.launch(path, **ALONE) as client:
            return await ask_one_by_one(client, requests)

    async def together() -> tuple[list[Any], Any]:
        async with AsyncClient.launch(path, **SETTINGS, speculative_config=speculation) as client:
            asking = asyncio.create_task(ask_all(client, requests))
            await strike(client, 1)
            results = await asking
            assert await ask_all(client, requests) == results, "other answers from checkpoints and earlier outputs"
            return results, await client.engine_stats()

    results, stats = asyncio.run(together())
    assert results == asyncio.run(alone())
    assert 0 < stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens
    assert stats.num_free_blocks == stats.num_blocks, "slots were lost"
