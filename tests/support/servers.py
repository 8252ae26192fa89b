"""Runs `octavo serve` as a child process and inspects its descendants."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import warm_python
from waiting import TIMEOUT_S, wait_until

from octavo.protocol.lifecycle import adopt_orphans

START_TIMEOUT_S = 180.0


class Server:
    """A running `octavo serve`; its output is kept for assertions.

    Args:
        model: to serve.
        flags: further arguments after the model.
        environment: added to this process's environment.
        is_warm: fork the server from a process that has imported everything. Otherwise, its workers' fork server is its
            own.
    """

    process: "subprocess.Popen[str] | warm_python.WarmProcess"

    def __init__(
        self, model: Path | str, *flags: str, environment: dict[str, str] | None = None, is_warm: bool = True
    ) -> None:
        self.lines: list[str] = []
        command = ["-m", "octavo", "serve", str(model), "--port", "0", *flags]
        variables = {**os.environ, **(environment or {})}
        if is_warm:
            self.process = warm_python.start(command, stdout=subprocess.PIPE, env=variables)
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-P", *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=variables,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip("\n") for line in self.process.stdout)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_until_ready(self) -> "Server":
        """Wait for the log line with the address, and until the server is healthy."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if match := re.search(r"[Ll]istening on (http://127\.0\.0\.1:\d+)", self.output):
                self.url = match[1]
                if self.get("/health").status_code == 200:
                    return self
            time.sleep(0.05)
        raise AssertionError(f"the server did not start:\n{self.output}")

    def wait_for(self, pattern: str, count: int = 1, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until a pattern has matched `count` times in the output of the running server."""

        def has_come() -> bool:
            # Check the process first: output that it wrote before it ended counts.
            has_ended = self.process.poll() is not None and not self._reader.is_alive()
            num_matches = len(re.findall(pattern, self.output))
            assert num_matches >= count or not has_ended, f"ended without {pattern!r}:\n{self.output}"
            return num_matches >= count

        wait_until(has_come, lambda: f"waiting for {pattern!r}:\n{self.output}", timeout_s=timeout_s)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(TIMEOUT_S)
        return code

    @property
    def last_line(self) -> str:
        return [line for line in self.lines if line.strip()][-1]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()
        print(self.output)  # pytest shows it if the test fails


@contextlib.contextmanager
def serve(
    model: Path | str, *flags: str, environment: dict[str, str] | None = None, is_warm: bool = True
) -> Iterator[Server]:
    """Start a server and stop it on exit."""
    server = Server(model, *flags, environment=environment, is_warm=is_warm)
    try:
        yield server
    finally:
        server.close()


FORK_SERVER = "octavo.worker_proc.fork_server"
"""Module of the process from which workers are forked."""


def descendants(pid: int) -> list[int]:
    """Return the process ids below `pid`, from /proc. Workers count as below their core, even if forked elsewhere."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                core = re.search(r"\0core=(\d+)", (entry / "cmdline").read_text(errors="replace"))
                children.setdefault(int(core[1] if core else parent), []).append(int(entry.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def parent_of(pid: int) -> int:
    """Return the process that has started `pid`."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def of_module(pid: int, module: str) -> list[int]:
    """Return the processes below `pid` that run a Python module, sorted by id."""
    found = []
    for below in sorted(descendants(pid)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if module in Path(f"/proc/{below}/cmdline").read_text(errors="replace").split("\0"):
                found.append(below)
    return found


def is_running(pid: int) -> bool:
    """Return whether a process runs; `False` if it has exited, even if it is not reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextlib.contextmanager
def as_init_process() -> Iterator[None]:
    """Act like a container's init process that reaps nothing: orphans become children of this process."""
    adopt_orphans()
    try:
        yield
    finally:
        ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def are_reaped(pids: list[int]) -> bool:
    """Return whether all processes are gone, including zombies."""
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def left_after(pids: list[int], timeout_s: float = TIMEOUT_S) -> list[int]:
    """Return the `pids` that still run after `timeout_s`; return [] as soon as none does."""
    deadline = time.monotonic() + timeout_s
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal, and wait until the process has handled it and sleeps, or has ended.

    A second signal that came before would be merged with the first.
    """
    os.kill(pid, number)

    def is_handled() -> bool:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            return True
        fields = dict(line.split(":\t", 1) for line in lines)
        pending = int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)
        return fields["State"][0] in "ZX" or (fields["State"][0] == "S" and not pending >> (number - 1) & 1)

    wait_until(is_handled, interval_s=0.005)


def cpu_seconds(pid: int) -> float:
    """Return the user and system time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
