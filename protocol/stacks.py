"""What every thread of a process is doing, written to its log when somebody asks: for an engine that does not move.

A process answers even while Python code cannot run in it, as the answer comes from a C signal handler. Linux only: the
processes below one are found in /proc.
"""

import contextlib
import faulthandler
import os
import signal
from dataclasses import dataclass
from pathlib import Path

DUMP_SIGNAL = signal.SIGUSR1

STANDARD_ERROR = 2
"""The file descriptor itself: what stands in `sys.stderr` may have none."""

_STOPPED_STATES = "Tt"
"""Of /proc/PID/stat: by a signal, by a debugger."""


def enable_dumps() -> None:
    """From now on answer `DUMP_SIGNAL` by the stacks of all threads, on standard error."""
    faulthandler.register(DUMP_SIGNAL, file=STANDARD_ERROR, all_threads=True, chain=False)


@dataclass(frozen=True)
class ProcessLook:
    """A process as the system sees it."""

    pid: int
    name: str
    """The module it runs, else its program."""
    state: str
    """The letter of /proc/PID/stat: R runs, S waits, D waits for a device, T is stopped."""
    answers: bool
    """Whether `DUMP_SIGNAL` makes it tell its stacks; others it would end."""

    @property
    def is_stopped(self) -> bool:
        """True when it cannot answer before somebody lets it go on."""
        return self.state in _STOPPED_STATES

    def ask(self) -> None:
        """Have it write its stacks, if it can."""
        if self.answers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, DUMP_SIGNAL)


def look_at_tree(root: int) -> list[ProcessLook]:
    """Return a process and all below it, parents first; those that end meanwhile are left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
    found: list[ProcessLook] = []
    todo = [root]
    while todo:
        pid = todo.pop(0)
        todo += sorted(children.get(pid, []))
        with contextlib.suppress(OSError):
            found.append(_look_at(pid))
    return found


def _look_at(pid: int) -> ProcessLook:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    name = words[words.index("-m") + 1] if "-m" in words[:-1] else os.path.basename(words[0])
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.partition("\nSigCgt:")[2].split()[0], 16)
    return ProcessLook(pid, name, _stat(pid)[0], bool(caught >> (DUMP_SIGNAL - 1) & 1))


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
