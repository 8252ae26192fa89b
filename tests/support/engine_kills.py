"""Finds the processes of an engine that a test kills, and checks that their deaths change nothing."""

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hung_steps import hang_at
from servers import of_module, parent_of
from waiting import until, wait_until

from octavo import AsyncClient, SamplingParams


def core_of(client: AsyncClient) -> int:
    """Return the process of the core."""
    assert client.engine is not None
    return client.engine.core_pid


def worker_of(client: AsyncClient, rank: int = 0) -> int:
    """Return the process of a rank, once there is one."""
    return wait_until(lambda: of_module(core_of(client), "octavo.worker_proc")[rank:])[0]


def fork_server_of(client: AsyncClient) -> int:
    """Return the process from which the worker was forked; this process may have fork servers of other engines, too."""
    return parent_of(worker_of(client))


async def kill_worker_and_core(
    client: AsyncClient, at_worker: Path, at_core: Path, running: "asyncio.Future[Any]"
) -> None:
    """Kill the worker that hangs at the first mark of `hung_steps`, then the core whose worker hangs at the second."""
    await until(at_worker.exists)
    assert not running.done()
    os.kill(worker_of(client), signal.SIGKILL)
    await until(at_core.exists)
    assert not running.done()
    os.kill(core_of(client), signal.SIGKILL)


async def assert_deaths_change_nothing(
    client: AsyncClient, prompt_of: Callable[[int], Any], params: SamplingParams, num_requests: int = 9
) -> None:
    """Kill the worker and then the core while requests run; tokens and logprobs must equal those of an undisturbed run.

    `params` must request logprobs; each request has a seed of its own. The engine must have `hung_steps.PLUGIN`.
    """

    async def ask(seed: int, extra_args: dict[str, Any] | None = None) -> object:
        given = params.clone(seed=seed, extra_args=extra_args)
        outputs = [part async for part in client.generate(prompt_of(seed), given)]
        tokens = [token for part in outputs for token in part.outputs[0].token_ids]
        return tokens, [entry for part in outputs for entry in part.outputs[0].logprobs or []]

    expected = await asyncio.gather(*map(ask, range(num_requests)))
    with tempfile.TemporaryDirectory() as directory:
        at_worker, at_core = Path(directory) / "worker", Path(directory) / "core"
        extra_args = hang_at({5: at_worker, 20: at_core})
        running = asyncio.gather(*(ask(seed, extra_args) for seed in range(num_requests)))
        await kill_worker_and_core(client, at_worker, at_core, running)
        assert await running == expected
