"""Processes as /proc shows them: descendants, modules, memory and files; and signals to them."""

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """One process. Its start time distinguishes it from a later one with the same pid."""

    pid: int
    start_ticks: int
    module: str
    """The module after `python -m`; "" if there is none."""
    parent_pid: int = 0
    """Pid of the parent. For a worker that a fork server has forked, it is the core's."""

    @property
    def is_running(self) -> bool:
        """Whether it is running; False if it has exited and is not reaped yet."""
        try:
            fields = _stat(self.pid)
        except OSError:
            return False
        return int(fields[19]) == self.start_ticks and fields[0] not in ("Z", "X")


@dataclass(frozen=True)
class Footprint:
    """Memory and files of a process."""

    memory_bytes: int
    """Anonymous and shared memory; file mappings are not counted."""
    num_files: int
    """Open file descriptors, including sockets."""


def descendants(pid: int) -> list[Process]:
    """Return the descendants of `pid`, children before grandchildren."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        found += (next_ones := children.get(todo.pop(0), []))
        todo += next_ones
    return [process for one in found if (process := process_of(one))]


def process_of(pid: int) -> Process | None:
    """Return the process with this pid, None if there is none."""
    try:
        fields, words = _stat(pid), _arguments(pid)
        core = next((word.removeprefix("core=") for word in words if word.startswith("core=")), "")
        module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
        return Process(pid, int(fields[19]), module, int(core or fields[1]))
    except OSError:
        return None


def footprint(process: Process) -> Footprint | None:
    """Return the footprint of a process, None if it has exited."""
    try:
        status = (_PROC / str(process.pid) / "status").read_text()
        num_files = len(list((_PROC / str(process.pid) / "fd").iterdir()))
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    sizes = (fields.get("RssAnon", "0 kB"), fields.get("RssShmem", "0 kB"))
    return Footprint(sum(int(size.split()[0]) for size in sizes) * 1024, num_files)


def send_signal(process: Process, number: signal.Signals) -> bool:
    """Send a signal; return False if the process has exited, even if its pid was reused."""
    if not process.is_running:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)
        return True
    return False


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat that follow the name: state, parent, ..."""
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def _arguments(pid: int) -> list[str]:
    return (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
