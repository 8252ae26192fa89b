"""Stack dumps of every thread of a process, written to its log on request, to diagnose an engine that hangs.

A process dumps its stacks even while it cannot run Python code, because a C signal handler writes them. Linux only:
child processes are found in /proc.
"""

import contextlib
import faulthandler
import os
import signal
from dataclasses import dataclass
from pathlib import Path

DUMP_SIGNAL = signal.SIGUSR1

STANDARD_ERROR = 2
"""The file descriptor itself, because the object in `sys.stderr` may have none."""

_STOPPED_STATES = "Tt"
"""States in /proc/PID/stat: stopped by a signal, or by a debugger."""


def enable_dumps() -> None:
    """Handle `DUMP_SIGNAL` from now on by writing the stacks of all threads to standard error."""
    faulthandler.register(DUMP_SIGNAL, file=STANDARD_ERROR, all_threads=True, chain=False)


@dataclass(frozen=True)
class ProcessInfo:
    """A process as described by /proc."""

    pid: int
    name: str
    """The Python module that it runs, else the program."""
    state: str
    """The letter in /proc/PID/stat: R running, S sleeping, D waiting for a device, T stopped."""
    handles_dump: bool
    """Whether it handles `DUMP_SIGNAL`, which would kill any other process."""

    @property
    def is_stopped(self) -> bool:
        """True if it cannot run until it is continued."""
        return self.state in _STOPPED_STATES

    def request_dump(self) -> None:
        """Make the process write its stacks, if it handles the signal."""
        if self.handles_dump:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, DUMP_SIGNAL)


def process_tree(root: int) -> list[ProcessInfo]:
    """Return a process and all its descendants, parents first. Processes that exit meanwhile are omitted."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
    found: list[ProcessInfo] = []
    todo = [root]
    while todo:
        pid = todo.pop(0)
        todo += sorted(children.get(pid, []))
        with contextlib.suppress(OSError):
            found.append(_read_process(pid))
    return found


def _read_process(pid: int) -> ProcessInfo:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    name = words[words.index("-m") + 1] if "-m" in words[:-1] else os.path.basename(words[0])
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.partition("\nSigCgt:")[2].split()[0], 16)
    return ProcessInfo(pid, name, _stat(pid)[0], bool(caught >> (DUMP_SIGNAL - 1) & 1))


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
