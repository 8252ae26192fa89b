"""Finds the worker of an engine that a test kills, waits for its steps, and checks what deaths change: nothing."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

from servers import of_module, parent_of
from waiting import until, wait_until

from octavo import AsyncClient, SamplingParams


def worker_of(client: AsyncClient, rank: int = 0) -> int:
    """Return the process of a rank, once there is one."""
    engine = client.engine
    assert engine is not None
    return wait_until(lambda: of_module(engine.core_pid, "octavo.worker_proc")[rank:])[0]


def fork_server_of(client: AsyncClient) -> int:
    """Return the process from which the worker was forked; this process may have others, of other engines."""
    return parent_of(worker_of(client))


async def until_steps(client: AsyncClient, num_steps: int, asking: "asyncio.Future[Any]") -> None:
    """Wait until so many steps are done, or the requests are: on a busy machine they may be before we look."""

    async def are_done() -> bool:
        return asking.done() or (await client.engine_stats()).num_steps >= num_steps

    await until(are_done)


async def assert_deaths_change_nothing(
    client: AsyncClient, prompt_of: Callable[[int], Any], params: SamplingParams, num_requests: int = 9
) -> None:
    """Kill the worker and then the core while requests run, which must have the tokens and logprobs that they have
    without. `params` has logprobs; each request has a seed of its own.
    """

    async def ask(seed: int) -> object:
        outputs = [part async for part in client.generate(prompt_of(seed), params.clone(seed=seed))]
        tokens = [token for part in outputs for token in part.outputs[0].token_ids]
        return tokens, [entry for part in outputs for entry in part.outputs[0].logprobs or []]

    expected = await asyncio.gather(*map(ask, range(num_requests)))
    running = asyncio.gather(*map(ask, range(num_requests)))
    await until(lambda: client.num_live_requests == num_requests)
    steps = (await client.engine_stats()).num_steps
    await until_steps(client, steps + 3, running)
    os.kill(worker_of(client), signal.SIGKILL)
    await until_steps(client, steps + 20, running)
    assert client.engine is not None
    os.kill(client.engine.core_pid, signal.SIGKILL)
    assert await running == expected
