"""Several engines behind one client: the answers are those of one engine, whatever dies."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from waiting import until
from workloads import Ask, ask_all, random_requests

from octavo import LLM, AsyncClient, SamplingParams, StructuredOutputsParams
from octavo.frontend.engine_state import EngineState
from octavo.protocol.config.sources import engine_config
from octavo.protocol.errors import ConfigError

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 6, "data_parallel_size": 2}
SCHEMA = StructuredOutputsParams(json='{"type": "array", "items": {"type": "integer"}, "minItems": 20}')
SPECIAL = [
    SamplingParams(n=2, best_of=4, max_tokens=60, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=120, seed=6, structured_outputs=SCHEMA, logprobs=2),
    SamplingParams(max_tokens=150, temperature=0.0, repetition_penalty=1.1, logprobs=3, prompt_logprobs=1),
]
REQUESTS = [*random_requests(seed=11, count=30, vocab_size=100), *(Ask((9, 8, 7), params) for params in SPECIAL * 3)]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[Any]]:
    """Return what one engine answers."""

    async def main() -> list[list[Any]]:
        async with AsyncClient.connect(llm.client.address) as client:
            return await ask_all(client, REQUESTS)

    return asyncio.run(main())


def core_pid(client: AsyncClient, engine: int) -> int:
    process = client.engines[engine].process
    assert process is not None
    return process.core_pid


def test_a_storm_over_dying_engines(model: Path, expected: list[list[Any]]) -> None:
    async def main() -> None:
        async with AsyncClient.launch(str(model), **SETTINGS) as client:
            for engine in (0, 1):
                asking = asyncio.create_task(ask_all(client, REQUESTS))
                link = client.engines[engine].link
                # Half of the requests are with each; the other engine takes those of the one that is killed.
                await until(lambda link=link: link.num_live_requests > 3)
                os.kill(core_pid(client, engine), signal.SIGKILL)
                await until(lambda link=link: not link.is_up and not link.num_live_requests)
                assert client.health().ok, "the other engine serves"
                assert [report.ok for report in client.engine_reports()] == [engine == 1, engine == 0]
                for request, got, want in zip(REQUESTS, await asking, expected, strict=True):
                    assert got == want, request
                await until(lambda link=link: link.is_up)
            asking = asyncio.create_task(ask_all(client, REQUESTS))
            await until(lambda: client.engines[0].link.num_live_requests > 3)
            client.engine_set.set_states({0: EngineState.DRAINING})
            client.engine_set.move_requests([0])
            await until(lambda: not client.engines[0].link.num_live_requests)
            assert await asking == expected, "those that moved from a live engine too"
            client.engine_set.set_states({0: EngineState.SERVING})
            stats = await client.engine_stats()
            assert stats.num_running == stats.num_waiting == 0
            assert stats.num_free_blocks == stats.num_blocks, "blocks were lost"
            assert await ask_all(client, REQUESTS) == expected, "after everything"

    asyncio.run(main())


def test_engines_are_replaced_one_by_one_under_load(model: Path, expected: list[list[Any]]) -> None:
    async def main() -> None:
        async with AsyncClient.launch(str(model), **SETTINGS) as client:
            before = [core_pid(client, engine) for engine in (0, 1)]
            with pytest.raises(ConfigError, match="data_parallel_size 1: 2 engines run"):
                await client.restart(engine_config({"model": str(model), **SETTINGS, "data_parallel_size": 1}))
            asking = asyncio.create_task(ask_all(client, REQUESTS))
            await until(lambda: all(one.link.num_live_requests for one in client.engines))
            await client.restart(engine_config({"model": str(model), **SETTINGS, "max_num_seqs": 5}))
            assert await asking == expected
            assert not set(before) & {core_pid(client, engine) for engine in (0, 1)}
            await until(lambda: [engine.config.max_num_seqs for engine in client.engines] == [5, 5])

    asyncio.run(main())
