"""Memory of a real HTTP server for each waiting request, compared with a bare FastAPI application on uvicorn.

This process plays the core and the callers. Each connection first asks for `/health`, so only the requests count.
"""

import asyncio
import random
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import uvloop
from bench_overhead import write_model
from own_server import serving

from bench_core_parts.engine import Process
from bench_core_parts.frontend_cost import PlayedCore, request, until
from bench_core_parts.scenarios import Figures

PROMPT_WORDS = 100
"""Words of the prompt: about as many tokens."""
NUM_WARM_UP = 50
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
HEADERS = "".join([f"x-client-header-{number}: {'v' * 20}\r\n" for number in range(10)]).encode()
"""Headers as large as those that client libraries send."""
CASES = [(kind, is_streamed, b"") for kind in ("completion", "chat") for is_streamed in (False, True)]
CASES.append(("completion", False, HEADERS))


def frontend_waiting(num_waiting: int) -> Figures:
    """Return the bytes of private memory per waiting request."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with (
        tempfile.TemporaryDirectory(prefix="bench_core-") as directory,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_measure(directory, num_waiting))


class _Caller(asyncio.Protocol):
    """A connection that counts the responses."""

    num_responses = 0

    def data_received(self, data: bytes) -> None:
        _Caller.num_responses += data.count(b"HTTP/1.1 200")


async def _measure(directory: str, num_waiting: int) -> Figures:
    write_model(Path(directory))
    figures: Figures = {}
    for kind, is_streamed, headers in CASES:
        message = request(kind, random.Random(0), PROMPT_WORDS, is_streamed=is_streamed, more_headers=headers)
        name = f"{'streamed' if is_streamed else 'whole'} {kind}, {4 + headers.count(b': ')} headers"
        figures[f"frontend, a waiting {name}: bytes"] = await _octavo_bytes(directory, num_waiting, message)
    message = request("completion", random.Random(0), PROMPT_WORDS, is_streamed=False)
    figures["bare FastAPI, a waiting request, 4 headers: bytes"] = await _bare_bytes(num_waiting, message)
    return figures


async def _octavo_bytes(directory: str, num_waiting: int, message: bytes) -> float:
    address = f"ipc://{directory}/core"
    core = PlayedCore(address, directory)
    entering = serving(f"--join={address}", ["--disable-uvicorn-access-log", "--shutdown-timeout", "0"])
    url, pid = await asyncio.to_thread(entering.__enter__)
    try:

        async def is_reached(count: int) -> None:
            await until(lambda: len(core.waiting) == count)

        return await _bytes_per_request(Process(pid), int(url.rpartition(":")[2]), num_waiting, message, is_reached)
    finally:
        await asyncio.to_thread(entering.__exit__, None, None, None)
        core.close()


async def _bare_bytes(num_waiting: int, message: bytes) -> float:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = str(Path(__file__).parent / "bare_fastapi.py")
    with await asyncio.to_thread(subprocess.Popen, [sys.executable, "-P", script, str(port)]) as process:
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:

                async def is_reached(count: int) -> None:
                    async with asyncio.timeout(60):
                        while True:
                            try:
                                if (await http.get("/health")).json() == count:
                                    return
                            except httpx.TransportError:  # not listening yet
                                pass
                            await asyncio.sleep(0.05)

                await is_reached(0)
                return await _bytes_per_request(Process(process.pid), port, num_waiting, message, is_reached)
        finally:
            process.kill()


async def _bytes_per_request(
    process: Process, port: int, num_waiting: int, message: bytes, is_reached: Callable[[int], Awaitable[None]]
) -> float:
    loop = asyncio.get_running_loop()
    connections: list[asyncio.Transport] = []
    for count in (NUM_WARM_UP, num_waiting):
        _Caller.num_responses = 0
        fresh = [(await loop.create_connection(_Caller, "127.0.0.1", port))[0] for _ in range(count)]
        connections += fresh
        for connection in fresh:
            connection.write(HEALTH)
        await until(lambda count=count: _Caller.num_responses == count)
        before = process.rss_bytes
        for connection in fresh:
            connection.write(message)
        await is_reached(len(connections))
        grown = process.rss_bytes - before
    for connection in connections:
        connection.abort()
    return grown / num_waiting
