"""A client process of a run: `python -P -m octavo.frontend.cli.bench.chaos.client`.

Reads a `Place` and then `Job`s from standard input, and writes a `Result` for each to standard output as soon as there
is one; ends when nobody writes to it any more. It may be killed at any moment.
"""

import asyncio
import sys

import msgspec

from octavo.frontend.cli.bench.chaos.callers import Caller, HttpCaller, JoinedCaller, result_of
from octavo.frontend.cli.bench.chaos.jobs import Job, Place
from octavo.frontend.client import AsyncClient
from octavo.protocol.errors import EngineDeadError, StartupError

MAX_LINE_BYTES = 2**22

JOIN_TIMEOUT_S = 120.0
"""How long to try to join an engine that is being started again."""

RETRY_S = 0.5


async def main() -> None:
    """Do every job that comes, all at once."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    place = msgspec.json.decode(await reader.readline(), type=Place)
    caller: Caller = HttpCaller(place) if place.url else JoinedCaller(await _join(place.address))
    _say(b"{}")
    tasks: set[asyncio.Task[None]] = set()
    try:
        while line := await reader.readline():
            job = msgspec.json.decode(line, type=Job)
            task = asyncio.create_task(_do(caller, job, place.timeout_s))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await caller.close()


async def _do(caller: Caller, job: Job, timeout_s: float) -> None:
    _say(msgspec.json.encode(await result_of(caller, job, timeout_s)))


async def _join(address: str) -> AsyncClient:
    """Join the engine, which may be between two lives.

    Raises:
        StartupError, EngineDeadError: it does not come back.
    """
    deadline = asyncio.get_running_loop().time() + JOIN_TIMEOUT_S
    while True:
        try:
            return await AsyncClient.connect(address)
        except (StartupError, EngineDeadError):  # there is no engine, or it died before it answered
            if asyncio.get_running_loop().time() > deadline:
                raise
        await asyncio.sleep(RETRY_S)


def _say(line: bytes) -> None:
    # A pipe takes lines whole only when they are short, but this process has one thread.
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    asyncio.run(main())
