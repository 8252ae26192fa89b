"""Clients of an HTTP server in a separate process: many connections, each with one request.

Prints a line when every client is served as far as possible: a stream has its first event, any other call is sent. All
clients disconnect at once when standard input ends.
"""

import asyncio
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONNECTED_AT_ONCE = 100


@contextmanager
def callers(port: int, count: int, body: dict) -> Iterator["subprocess.Popen[bytes]"]:
    """Start clients that all send the same body, and wait until they are served; they disconnect on exit."""
    scripts = Path(__file__).parent.parent
    code = f"import sys; sys.path.insert(0, {str(scripts)!r}); import bench_core_parts.http_callers as c; c.main()"
    arguments = [str(port), str(count), json.dumps(body)]
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            if process.stdout.readline() != b"served\n":
                raise RuntimeError("the callers were not served")
            yield process
        finally:
            process.stdin.close()
            process.wait()


def main() -> None:
    """Send the requests, and stay connected until standard input ends."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.nice(19)  # real clients are on other machines: these must not take processor time from the server
    asyncio.run(_call(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])))


class _Caller(asyncio.Protocol):
    def __init__(self, request: bytes, served: "asyncio.Queue[None]", *, is_stream: bool) -> None:
        self._request = request
        self._served = served
        self._is_stream = is_stream

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.write(self._request)
        if not self._is_stream:
            self._served.put_nowait(None)

    def data_received(self, data: bytes) -> None:
        if self._is_stream:
            assert data.startswith(b"HTTP/1.1 200"), data
            self._is_stream = False
            self._served.put_nowait(None)


async def _call(port: int, count: int, body: dict) -> None:
    loop = asyncio.get_running_loop()
    left = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), left.set)
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    )
    request = head.encode() + b"\r\n\r\n" + data
    served: asyncio.Queue[None] = asyncio.Queue()
    transports = []
    while len(transports) < count:
        connecting = [
            loop.create_connection(lambda: _Caller(request, served, is_stream=body["stream"]), "127.0.0.1", port)
            for _ in range(min(CONNECTED_AT_ONCE, count - len(transports)))
        ]
        transports += [transport for transport, _ in await asyncio.gather(*connecting)]
    for _ in range(count):
        await served.get()
    print("served", flush=True)
    await left.wait()
    for transport in transports:
        transport.abort()
