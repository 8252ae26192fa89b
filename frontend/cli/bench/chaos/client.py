"""A client process of a chaos run: `python -P -m octavo.frontend.cli.bench.chaos.client`.

Reads an `EngineLocation` and then `ChaosJob`s from standard input. Runs all jobs concurrently, and writes a `Result` to
standard output as each job ends. Exits when standard input is closed. It may be killed at any moment.
"""

import asyncio
import sys

import msgspec

from octavo.frontend.cli.bench.chaos.callers import Caller, HttpCaller, JoinedCaller, run_job
from octavo.frontend.cli.bench.chaos.jobs import ChaosJob, EngineLocation
from octavo.frontend.client import AsyncClient

MAX_LINE_BYTES = 2**22

JOIN_TIMEOUT_S = 120.0
"""Seconds to keep trying to join an engine, which may be restarting."""


async def main() -> None:
    """Run jobs from standard input until it is closed."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    location = msgspec.json.decode(await reader.readline(), type=EngineLocation)
    caller: Caller
    if location.url:
        caller = HttpCaller(location)
    else:
        caller = JoinedCaller(await AsyncClient.connect(location.address, connect_timeout_s=JOIN_TIMEOUT_S))
    _write_line(b"{}")
    tasks: set[asyncio.Task[None]] = set()
    try:
        while line := await reader.readline():
            job = msgspec.json.decode(line, type=ChaosJob)
            task = asyncio.create_task(_run(caller, job, location.timeout_s))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await caller.close()


async def _run(caller: Caller, job: ChaosJob, timeout_s: float) -> None:
    _write_line(msgspec.json.encode(await run_job(caller, job, timeout_s)))


def _write_line(line: bytes) -> None:
    # Writes longer than PIPE_BUF are not atomic, but this process has one thread.
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    asyncio.run(main())
