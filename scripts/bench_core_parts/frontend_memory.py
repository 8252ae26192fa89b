"""Memory of a real frontend connection for waiting requests: a separate process that prints bytes per token."""

import asyncio
import json
import os
import sys

import zmq

from bench_core_parts.engine import Process
from bench_core_parts.messages import prompt_of, submission
from octavo.frontend.link import CoreLink
from octavo.frontend.wake_event import WakeEvent, WakeQueue
from octavo.protocol.requests import GetStats


async def main(address: str, count: int, prompt_len: int) -> None:
    """Submit requests through the real link, and print the growth of the process in bytes per token."""
    context = zmq.Context()
    link = await CoreLink.connect(context, address, 30.0)
    process = Process(os.getpid())
    wake = WakeEvent(WakeQueue())
    before = process.rss_bytes
    streams = []
    for index in range(count):
        streams.append(link.submit(submission(f"m{index}", prompt_of(index, prompt_len), 16), wake))
        if index % 100 == 99:
            await asyncio.sleep(0)
    while (await link.call(GetStats())).num_waiting < count:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    print(json.dumps((process.rss_bytes - before) / (count * prompt_len)), flush=True)
    await link.close()
    context.term()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
