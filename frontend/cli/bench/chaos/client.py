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

MAX_LINE_BYTES = 2**22

JOIN_TIMEOUT_S = 120.0
"""How long to try to join an engine that is being started again."""


async def main() -> None:
    """Do every job that comes, all at once."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    place = msgspec.json.decode(await reader.readline(), type=Place)
    caller: Caller
    if place.url:
        caller = HttpCaller(place)
    else:
        caller = JoinedCaller(await AsyncClient.connect(place.address, connect_timeout_s=JOIN_TIMEOUT_S))
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


def _say(line: bytes) -> None:
    # A pipe takes lines whole only when they are short, but this process has one thread.
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    asyncio.run(main())
