"""The processes of an engine: finding them, their memory and processor time, ending them.

Reads /proc. Knows no engine.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

# Positions in /proc/PID/stat, counted from the state, which follows the name in parentheses.
_STATE, _PARENT, _SESSION, _USER, _SYSTEM, _ENDED_USER, _ENDED_SYSTEM = 0, 1, 3, 11, 12, 13, 14


def tree(root: int) -> list[int]:
    """Return the process and all its live descendants."""
    children = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children[int(fields[_PARENT])].append(int(entry.name))
    found = [root]
    for pid in found:  # grows during the iteration
        found += children[pid]
    return found


def pss_bytes(pids: Iterable[int]) -> int:
    """Return the memory of the processes, each shared page counted in equal parts by all that map it."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the processor time of the processes and their ended children so far."""
    ticks = 0
    for pid in pids:
        if fields := _stat(pid):
            ticks += sum(int(fields[index]) for index in (_USER, _SYSTEM, _ENDED_USER, _ENDED_SYSTEM))
    return ticks / _TICKS_PER_S


class LoadOfOthers:
    """Number of cores that processes other than the given ones have used since this object was created."""

    def __init__(self, roots: Iterable[int]) -> None:
        self._roots = list(roots)
        self._started = time.monotonic()
        self._busy_s, self._own_s = self._now()

    def cores(self) -> float:
        """Return the number of cores; 0 if nothing else ran."""
        busy_s, own_s = self._now()
        other_s = (busy_s - self._busy_s) - (own_s - self._own_s)
        return max(0.0, other_s / (time.monotonic() - self._started))

    def _now(self) -> tuple[float, float]:
        # user nice system idle iowait irq softirq steal: everything except idle and iowait is work.
        counts = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        busy_s = (sum(counts) - counts[3] - counts[4]) / _TICKS_PER_S
        return busy_s, cpu_seconds([os.getpid(), *(pid for root in self._roots for pid in tree(root))])


def send_signal(root: int, number: signal.Signals) -> None:
    """Send a signal to the process and all its descendants."""
    for pid in tree(root):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end(process: "subprocess.Popen[bytes]", grace_s: float = 10.0) -> None:
    """End a process that leads its own session, and everything in that session: by force after `grace_s` seconds.

    Returns when none of these processes runs any more.
    """
    send_signal(process.pid, signal.SIGCONT)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    while members := _session(process.pid):
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        time.sleep(0.01)


def _session(leader: int) -> list[int]:
    """Return the processes of a session that have not ended."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    stats = ((pid, _stat(pid)) for pid in pids)
    return [pid for pid, fields in stats if fields and int(fields[_SESSION]) == leader and fields[_STATE] not in "ZX"]


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None  # it ended in the meantime
    return text.rpartition(")")[2].split()
