"""Stack dumps of processes that hang; a process that would not survive the signal is left alone."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from waiting import TIMEOUT_S, join, read_line, wait_until

from octavo.protocol.stacks import process_tree

SLEEPER = """
import ctypes
from octavo.protocol.stacks import enable_dumps
enable_dumps()
def stuck_in_a_kernel():
    print("ready", flush=True)
    while True:
        ctypes.PyDLL(None).sleep(60)  # keeps the interpreter's lock: no Python code can run; a signal ends it early
stuck_in_a_kernel()
"""
STRANGER = "import time; print('ready', flush=True); time.sleep(60)"


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
        )
        for source in (SLEEPER, STRANGER)
    ]
    for process in started:
        assert read_line(process.stdout) == "ready\n"
    yield started
    for process in started:
        process.kill()
        process.wait(TIMEOUT_S)
        process.stdout.close(), process.stderr.close()


def test_a_stuck_process_dumps_its_stack_and_foreign_processes_are_not_signaled(
    processes: list[subprocess.Popen[str]],
) -> None:
    stuck, stranger = processes
    found = {process.pid: process for process in process_tree(os.getpid())}
    assert found[stuck.pid].handles_dump and not found[stranger.pid].handles_dump
    for process in found.values():
        if process.pid != os.getpid():
            process.request_dump()
    assert stuck.stderr is not None
    seen: list[str] = []
    reader = threading.Thread(target=lambda: seen.extend(stuck.stderr), daemon=True)
    reader.start()
    wait_until(lambda: "stuck_in_a_kernel" in "".join(seen), lambda: seen)
    assert stuck.poll() is None and stranger.poll() is None
    stuck.kill()
    join(reader)


def test_a_stopped_process_is_known_as_such(processes: list[subprocess.Popen[str]]) -> None:
    stuck, _ = processes
    os.kill(stuck.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, stuck.pid, os.WSTOPPED | os.WNOWAIT)
    (process,) = process_tree(stuck.pid)
    assert process.is_stopped
