"""Finds octavo processes that a test run has left behind, even if they were reparented."""

import os
import signal
import time
from pathlib import Path

CHILD_MODULES = (
    "octavo.core_proc",
    "octavo.worker_proc",
    "-m octavo",
    "core_fake_",
    "fake_child",
    "fake_api_worker",
    "warm_python",
)


def leaked_processes(mark: str, *, timeout_s: float) -> dict[int, str]:
    """Return {pid: command line} of the children, real or fake, that carry `mark` in their environment.

    Orphans are reparented to init, so ancestry cannot identify them; the environment can.

    Blocks until: there are none, or `timeout_s` has passed.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        found = dict(_marked_children(mark.encode()))
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def kill(pids: list[int]) -> None:
    """Kill the processes; skip those that have already exited."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _marked_children(mark: bytes) -> list[tuple[int, str]]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if not any(module in command for module in CHILD_MODULES):
                continue
            if mark in (folder / "environ").read_bytes():
                found.append((int(folder.name), command))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # It has exited, or belongs to another user.
    return found
