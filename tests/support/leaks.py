"""Finds octavo processes that a test run has left behind, whoever their parent is by now."""

import os
import signal
import time
from pathlib import Path

CHILD_MODULES = ("octavo.core_proc", "octavo.worker_proc", "-m octavo", "core_fake_", "fake_child", "fake_sibling")


def leaked_processes(mark: str, *, timeout_s: float) -> dict[int, str]:
    """Return {pid: command line} of the children, real or fake, that carry `mark` in their environment.

    An orphan's parent is the init process, so descent says nothing; the environment is inherited for good.

    Blocks until: there are none, or `timeout_s` has passed.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        found = dict(_marked_children(mark.encode()))
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def kill(pids: list[int]) -> None:
    """End the processes; those that have ended meanwhile are passed over."""
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
            continue  # It ended while we looked, or belongs to somebody else.
    return found
