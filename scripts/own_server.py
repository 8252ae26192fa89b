"""Runs `octavo serve` while a benchmark runs. Measures nothing."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0


@contextlib.contextmanager
def serving(model: str, flags: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """Start a server on a free port, yield its URL and process id once it answers, and end it on leaving.

    Raises:
        SystemExit: it ended while it started, or did not answer in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    octavo = Path(sys.executable).parent / "octavo"
    process = subprocess.Popen([octavo, "serve", model, "--port", str(port), *flags])
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(process, url)
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_until_healthy(process: "subprocess.Popen[bytes]", url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with code {process.returncode} while it started")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.1)
    raise SystemExit(f"the server was not ready after {START_TIMEOUT_S:.0f} s")
