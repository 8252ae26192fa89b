"""Starts and stops an engine's HTTP server, and runs load generators against it."""

import http.client
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_cpu_parts.engines import Command
from bench_cpu_parts.session import EngineFailure, Program

SCRIPTS = Path(__file__).resolve().parent.parent
POLL_S = 0.02


class Server(Program):
    """A server on a port of this machine."""

    def __init__(self, command: Command, log: Path, port: int) -> None:
        """Start the server; do not wait until it is ready."""
        super().__init__(command, log)
        self._port = port

    @property
    def url(self) -> str:
        """Base URL of the server."""
        return f"http://127.0.0.1:{self._port}"

    def wait_until_ready(self, limit_s: float) -> None:
        """Wait until the server's health check succeeds.

        Raises:
            EngineFailure: the check did not succeed within `limit_s` seconds, or the server has exited.
        """
        while True:
            if self.process.poll() is not None:
                raise self.failure(f"it ended with code {self.process.returncode}")
            if time.monotonic() > self.started + limit_s:
                raise self.failure(f"not ready after {limit_s:.0f} s")
            try:
                if self._ask("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass  # the server does not listen yet
            time.sleep(POLL_S)

    def first_token(self, model: str) -> None:
        """Wait for one token of a short prompt.

        Raises:
            EngineFailure: the server responded with an error.
        """
        rng = random.Random(0)
        body = {"model": model, "prompt": [rng.randint(300, 30_000) for _ in range(8)], "max_tokens": 1}
        try:
            status, answer = self._ask("POST", "/v1/completions", body)
        except OSError as error:
            raise self.failure(f"no first token: {error!r}") from error
        if status != 200:
            raise self.failure(f"status {status}: {answer[:200]!r}")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            content = json.dumps(body) if body else None
            connection.request(method, path, content, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                return response.status, response.read()
        finally:
            connection.close()


def run_script(name: str, flags: list[str], limit_s: float) -> dict[str, Any]:
    """Run a benchmark of this folder and return the report that it writes.

    Raises:
        EngineFailure: the benchmark failed, or took longer than the limit.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command: list[str | Path] = [sys.executable, SCRIPTS / name, *flags, "--json", path]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise EngineFailure(f"{name} took longer than {limit_s:.0f} s") from error
        if done.returncode != 0:
            raise EngineFailure(f"{name} failed:\n    " + "\n    ".join(done.stderr.splitlines()[-5:]))
        report: dict[str, Any] = json.loads(path.read_text())
        return report
