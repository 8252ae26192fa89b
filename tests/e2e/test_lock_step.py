"""Engines that divide the experts: the answers are those of one engine, under uneven load, and whatever dies."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_models import make_tiny
from waiting import until
from workloads import Ask, ask, ask_all, random_requests

from octavo import AsyncClient, SamplingParams, StructuredOutputsParams
from octavo.frontend.engine_state import EngineState
from octavo.protocol.config.sources import engine_config
from octavo.protocol.errors import EngineDeadError, RequestFailedError, StartupError

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 6, "num_threads": 1}
ENGINES: dict[str, Any] = {**SETTINGS, "data_parallel_size": 2, "enable_expert_parallel": True}
SCHEMA = StructuredOutputsParams(json='{"type": "array", "items": {"type": "integer"}, "minItems": 20}')
SPECIAL = [
    SamplingParams(max_tokens=90, seed=6, structured_outputs=SCHEMA, logprobs=2),
    SamplingParams(max_tokens=120, temperature=0.0, repetition_penalty=1.1, logprobs=3, prompt_logprobs=1),
]
REQUESTS = [*random_requests(seed=11, count=16, vocab_size=100), *(Ask((9, 8, 7), params) for params in SPECIAL * 3)]


KILLER = """
import os, pathlib, signal
from octavo import AdapterLogitsProcessor

class KillOther(AdapterLogitsProcessor):
    def __init__(self, config, device, is_pin_memory):
        super().__init__(config, device, is_pin_memory)
        self.pids = pathlib.Path(__file__).parent
        self.engine = config.engine_index
        (self.pids / f"worker{self.engine}").write_text(str(os.getpid()))

    def is_argmax_invariant(self):
        return True

    def new_req_logits_processor(self, params):
        if "kills_at" not in (params.extra_args or {}):
            return None

        def process(prompt, output, logits):
            if len(output) == params.extra_args["kills_at"]:
                os.kill(int((self.pids / f"worker{1 - self.engine}").read_text()), signal.SIGKILL)
                signal.pause()  # the step never ends, as if the other worker had died before the exchange
            return logits

        return process
"""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("Qwen3MoeForCausalLM", tmp_path_factory.mktemp("mixture") / "model")


@pytest.fixture(scope="module")
def expected(mixture: Path) -> list[list[Any]]:
    """Return what one engine with all experts answers."""

    async def main() -> list[list[Any]]:
        async with AsyncClient.launch(str(mixture), **SETTINGS) as client:
            return await ask_all(client, REQUESTS)

    return asyncio.run(main())


def core_of(client: AsyncClient, engine: int) -> psutil.Process:
    process = client.engines[engine].process
    assert process is not None
    return psutil.Process(process.core_pid)


def worker_of(client: AsyncClient, engine: int) -> psutil.Process:
    return next(child for child in core_of(client, engine).children(recursive=True) if not child.children())


async def ask_while(client: AsyncClient, kill: psutil.Process) -> list[list[Any]]:
    """Return the answers of a storm in the middle of which a process is killed."""
    asking = asyncio.create_task(ask_all(client, REQUESTS))
    await until(lambda: all(engine.link.num_live_requests > 3 for engine in client.engines))
    os.kill(kill.pid, signal.SIGKILL)
    return await asking


def test_engines_that_divide_the_experts_give_the_bits_of_one(mixture: Path, expected: list[list[Any]]) -> None:
    async def main() -> None:
        async with AsyncClient.launch(str(mixture), **ENGINES) as client:
            assert await ask_all(client, REQUESTS) == expected
            client.engine_set.set_states({1: EngineState.DRAINING})
            assert await ask_all(client, REQUESTS) == expected, "engine 1 has part of the experts and no requests"
            client.engine_set.set_states({1: EngineState.SERVING})
            assert await ask_while(client, worker_of(client, 1)) == expected, "a worker of engine 1 was killed"
            with pytest.raises(StartupError, match="cannot be replaced while they run"):
                await client.restart(engine_config({"model": str(mixture), **ENGINES, "max_num_seqs": 5}))

    asyncio.run(main())


def test_all_requests_fail_at_once_if_an_engine_is_given_up(mixture: Path) -> None:
    async def main() -> None:
        async with AsyncClient.launch(str(mixture), **ENGINES, restart_core=False) as client:
            asking = [asyncio.create_task(ask(client, request)) for request in REQUESTS]
            await until(lambda: all(engine.link.num_live_requests > 3 for engine in client.engines))
            core_of(client, 1).kill()
            for error in await asyncio.gather(*asking, return_exceptions=True):
                assert isinstance(error, EngineDeadError | list)
            await until(lambda: all(engine.link.failure for engine in client.engines))
            failures = [str(engine.link.failure) for engine in client.engines]
            assert failures[0] == f"engine 1, which has a part of the experts, was given up: {failures[1]}"
            await until(lambda: not any(engine.process.is_running for engine in client.engines))

    asyncio.run(main())


@pytest.mark.long
def test_requests_that_kill_the_worker_of_another_engine_fail_alone(
    mixture: Path, expected: list[list[Any]], tmp_path: Path
) -> None:
    file = tmp_path / "killer.py"
    file.write_text(KILLER)
    poison = SamplingParams(max_tokens=60, seed=1, ignore_eos=True, extra_args={"kills_at": 20})

    async def main() -> None:
        async with AsyncClient.launch(str(mixture), **ENGINES, logits_processors=[f"{file}:KillOther"]) as client:
            asking = [asyncio.create_task(ask(client, Ask((5, 6, 7), poison))) for _ in range(2)]
            assert await ask_all(client, REQUESTS) == expected
            for guilty in asking:
                with pytest.raises(RequestFailedError, match="crashes the workers"):
                    await guilty
            assert await ask_all(client, REQUESTS) == expected, "nobody is held back any more"

    asyncio.run(main())


@pytest.mark.long
def test_a_stopped_core_without_requests_is_replaced(mixture: Path, expected: list[list[Any]]) -> None:
    timeouts = {"execute_model_timeout": 2, "core_timeout": 3}

    async def main() -> None:
        async with AsyncClient.launch(str(mixture), **ENGINES, **timeouts) as client:
            client.engine_set.set_states({1: EngineState.DRAINING})
            stopped = core_of(client, 1)
            os.kill(stopped.pid, signal.SIGSTOP)
            assert await ask_all(client, REQUESTS) == expected
            assert core_of(client, 1).pid != stopped.pid

    asyncio.run(main())


@pytest.mark.long
def test_a_storm_over_dying_cores_and_workers(mixture: Path, expected: list[list[Any]]) -> None:
    """Two workers for each engine."""

    async def main() -> None:
        async with AsyncClient.launch(str(mixture), **ENGINES, tensor_parallel_size=2) as client:
            for engine in (0, 1):
                assert await ask_while(client, core_of(client, engine)) == expected, f"core {engine} was killed"
                await until(lambda: all(engine.link.is_up for engine in client.engines))
                assert await ask_while(client, worker_of(client, engine)) == expected, f"worker of {engine} was killed"
            assert await ask_all(client, REQUESTS) == expected, "after everything"
            stats = await client.engine_stats()
            assert stats.num_running == stats.num_waiting == 0
            assert stats.num_free_blocks == stats.num_blocks, "blocks were lost"

    asyncio.run(main())
