"""How long a core or an HTTP server takes to respond: a process that probes repeatedly and prints the times.

A core is probed for its counters, and responds in the loop's next iteration. A server is probed for `/health`, over a
new connection each time, like the probes of orchestrators.
"""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

INTERVAL_S = 0.002
HTTP_INTERVAL_S = 0.01
"""Seconds between probes of a server; longer than for a core, so that probes are a small part of its work."""


@contextmanager
def probing(address: str) -> Iterator[list[float]]:
    """Probe the core or the `http://` server at an address while the context lasts.

    Afterwards the list holds the seconds of each response.
    """
    latencies: list[float] = []
    scripts = Path(__file__).parent.parent
    code = f"import sys; sys.path.insert(0, {str(scripts)!r}); import bench_core_parts.probe as p; p.main({address!r})"
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdout.readline()
            yield latencies
            process.stdin.write(b"\n")
            process.stdin.flush()
            latencies += json.loads(process.stdout.readline())
        finally:
            process.kill()


def main(address: str) -> None:
    """Probe until a line arrives on standard input."""
    import select

    is_http = address.startswith("http")
    ask = _server_probe(address) if is_http else _core_probe(address)
    interval_s = HTTP_INTERVAL_S if is_http else INTERVAL_S
    ask()
    print("ready", flush=True)
    latencies: list[float] = []
    while not latencies or not select.select([sys.stdin], [], [], interval_s)[0]:
        start = time.perf_counter()
        ask()
        latencies.append(time.perf_counter() - start)
    print(json.dumps(latencies), flush=True)


def _core_probe(address: str) -> Callable[[], object]:
    from bench_core_parts.engine import Client

    return Client(address).stats


def _server_probe(url: str) -> Callable[[], object]:
    host, _, port = url.removeprefix("http://").partition(":")

    def ask() -> None:
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: probe\r\nconnection: close\r\n\r\n")
            answer = connection.recv(4096)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the server is not healthy: {answer!r}")

    return ask
