"""`ServerUnderTest`: manages an `octavo serve` process from its start to the check for leftovers. Sends no requests."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from octavo.frontend.cli.bench.chaos.processes import (
    Footprint,
    Process,
    descendants,
    footprint,
    process_of,
    send_signal,
)
from octavo.frontend.cli.errors import CommandError
from octavo.protocol.env import child_environment

CORE = "octavo.core_proc"
WORKER = "octavo.worker_proc"
API_WORKER = "octavo.frontend.http.api_worker"
SERVER = "octavo"

ROLES = {SERVER: "first HTTP process", API_WORKER: "further HTTP process", CORE: "core", WORKER: "worker"}

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
IDLE_TIMEOUT_S = 60.0
POLL_S = 0.05
STRAGGLERS_S = 2.0
"""Seconds that a process may outlive the server."""

_LISTENING = re.compile(r"listening on (http://\S+:\d+)", re.IGNORECASE)
_ADDRESSES = re.compile(r"engine address for further applications: (\S+)")
_FAULT = re.compile(r"Traceback \(most recent call last\)|InvariantBroken|was killed by SIG(?!KILL|TERM)")
"""Log lines that must never appear, even if processes are killed from outside."""

_GAUGES = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")


class ServerUnderTest:
    """A running `octavo serve`.

    Args:
        settings: settings of the engine and the server.
        directory: directory for sockets and settings; must not exist yet.
        log: file for the server's output.
    """

    def __init__(self, settings: Mapping[str, Any], directory: Path, log: Path) -> None:
        self._directory = directory
        self._runtime = directory / "run"
        self._runtime.mkdir(parents=True)
        self.addresses = [f"ipc://{directory}/engine"]
        """Addresses of all engines, once the server is ready."""
        self.log = log
        self._seen: dict[int, Process] = {}
        self._num_api_workers = settings.get("api_server_count", 1) - 1
        self.num_engines: int = settings.get("data_parallel_size", 1)
        self.num_ranks: int = settings.get("tensor_parallel_size", 1) * settings.get("pipeline_parallel_size", 1)
        """Number of workers of each engine."""
        file = directory / "settings.yaml"
        served = {**settings, "port": 0, "engine_address": self.addresses[0]}
        file.write_bytes(msgspec.json.encode(served))  # YAML reads JSON
        environment = {"XDG_RUNTIME_DIR": str(self._runtime), "OCTAVO_CHECK": "1"}
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "octavo", "serve", "--config", str(file)],
                stdout=sink,
                stderr=sink,
                env=child_environment(environment),
            )
        self.url = ""

    @property
    def is_running(self) -> bool:
        """False when the server has ended."""
        return self._process.poll() is None

    async def wait_until_ready(self) -> None:
        """Wait until the server listens.

        Raises:
            CommandError: the server exited, or was not ready in time.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.is_running:
            text = self.log.read_text(errors="replace")
            if match := _LISTENING.search(text):
                self.url = match[1]
                addresses = _ADDRESSES.search(text)
                self.addresses = addresses[1].split(",") if addresses else self.addresses
                return
            await asyncio.sleep(POLL_S)
        raise CommandError(f"the server did not start: {self._last_line()}")

    def _last_line(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "its log is empty"

    async def wait_for_end(self) -> CommandError:
        """Wait until the server exits; return an error with the last line of its log."""
        while self.is_running:  # noqa: ASYNC110  (a child of `subprocess`, which has no event)
            await asyncio.sleep(POLL_S)
        return CommandError(f"the server exited unexpectedly: {self._last_line()}")

    def processes(self, module: str) -> list[Process]:
        """Return the server's processes that run a module."""
        everyone = descendants(self._process.pid)
        self._seen |= {process.pid: process for process in everyone}
        if module == SERVER:
            return [first] if (first := process_of(self._process.pid)) else []
        return [process for process in everyone if process.module == module]

    def workers_of_rank(self, rank: int) -> list[Process]:
        """Return the worker with this rank of each engine. An engine that is starting may have none."""
        by_core: dict[int, list[Process]] = {}
        for process in self.processes(WORKER):
            by_core.setdefault(process.parent_pid, []).append(process)
        # A core starts its workers in the order of their ranks.
        return [
            sorted(workers, key=lambda worker: (worker.start_ticks, worker.pid))[rank]
            for workers in by_core.values()
            if len(workers) > rank
        ]

    def footprints(self) -> dict[str, Footprint]:
        """Return the largest memory and file count of a process, by role."""
        most: dict[str, Footprint] = {}
        for module, role in ROLES.items():
            held = [one for process in self.processes(module) if (one := footprint(process))]
            if held:
                most[role] = Footprint(max(one.memory_bytes for one in held), max(one.num_files for one in held))
        return most

    async def wait_until_idle(self) -> str:
        """Wait until every process runs, the server is healthy, and no request or block is in use.

        Returns:
            A description of the problem after the timeout; "" if the server became idle.
        """
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            problem = await asyncio.to_thread(self._problem)
            if not problem or time.monotonic() > deadline:
                return problem
            await asyncio.sleep(0.25)

    def _problem(self) -> str:
        try:
            health = _get(f"{self.url}/health")
            text = _get(f"{self.url}/metrics")
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        if len(self.processes(API_WORKER)) < self._num_api_workers:
            return "an HTTP process is missing"
        down = [state for state in json.loads(health or "{}").get("engines", ()) if not state["ok"]]
        if down or len(self.processes(WORKER)) < self.num_engines * self.num_ranks:
            return f"an engine is down: {down}"
        values = {name: _sample(text, name) for name in _GAUGES}
        return ", ".join(f"{name} is {value:g}" for name, value in values.items() if value)

    async def stop(self) -> list[str]:
        """Stop the server with SIGTERM. Return failures of the shutdown, and leftovers.

        Blocks until the server exits.
        """
        faults = []
        self.processes(CORE)
        self._process.send_signal(signal.SIGTERM)
        try:
            code = await asyncio.to_thread(self._process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            faults.append(f"the server did not exit within {STOP_TIMEOUT_S:.0f} s of SIGTERM")
        else:
            if code:
                faults.append(f"the server exited with code {code}")
        left = await asyncio.to_thread(self._leftovers_after, STRAGGLERS_S)
        faults += [f"a process was left behind: {process.module or process.pid}" for process in left]
        faults += [f"a file was left behind: {path.name}" for path in self._runtime.iterdir()]
        if (self._directory / "engine").exists():
            faults.append("a socket was left behind: the engine's address")
        self.kill()
        return faults

    def kill(self) -> None:
        """Kill all processes that are still running."""
        self._process.kill()
        self._process.wait()
        for process in self._leftovers():
            send_signal(process, signal.SIGKILL)

    def faults_in_log(self) -> list[str]:
        """Return log lines that show a bug, as opposed to a process that was killed from outside."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if _FAULT.search(line)]

    def _leftovers_after(self, timeout_s: float) -> list[Process]:
        deadline = time.monotonic() + timeout_s
        while (left := self._leftovers()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return left

    def _leftovers(self) -> list[Process]:
        return [process for process in self._seen.values() if process.is_running]


def _get(url: str) -> str:
    """Return the body of a GET.

    Raises:
        OSError: no response, or an error status.
    """
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return str(response.read(), "utf-8")
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        raise


def _sample(text: str, name: str) -> float:
    """Return the sum of a metric's samples."""
    return sum(float(value) for value in re.findall(rf"^octavo:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))
