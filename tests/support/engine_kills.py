"""Finds the worker of an engine that a test kills, and waits for its steps."""

import contextlib
from pathlib import Path

from servers import descendants
from waiting import until, wait_until

from octavo import AsyncClient


def worker_of(client: AsyncClient) -> int:
    """Return the process of the worker, once there is one."""
    engine = client.engine
    assert engine is not None

    def find() -> int:
        for pid in descendants(engine.core_pid):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if "octavo.worker_proc" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                    return pid
        return 0

    return wait_until(find)


async def until_steps(client: AsyncClient, num_steps: int) -> None:
    async def are_done() -> bool:
        return (await client.engine_stats()).num_steps >= num_steps

    await until(are_done)
