"""Chooses the number of threads of a step: all allowed ones, one if the step is small, fewer if cores are busy.

The threads of a step meet at a barrier after nearly every operation, so a thread whose core is taken by another process
stops all of them. Two threads on two cores beside one busy process are slower than one thread (measured with
`scripts/bench_threads.py`). The number never changes a result. `pool.cpp` starts the threads.
"""

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from octavo.kernels.native.library import NativeLibrary

SMALL_WORK = 500_000
"""Multiplications that one thread does in about 50 us, which is what waking another thread can cost."""

WINDOW_S = 0.1
"""Seconds between two decisions. `/proc/stat` counts in hundredths of a second."""
LOST_SHARE = 0.7
"""Time lost waiting for cores, relative to one thread's work, above which one thread fewer is faster."""
CROWDED_WINDOWS = 3
"""Consecutive windows with such a loss before a thread is removed. A server that accepts a request uses a core for only
a few milliseconds, too short for one thread fewer to pay off."""
IDLE_CORES = 0.7
"""Idle share of the cores at which one more thread is tried."""
RETRY_S = 0.2
"""Seconds before a removed thread is tried again; doubles with each failed attempt."""
MAX_RETRY_S = 5.0
TRIAL_S = 1.0
"""Seconds after which an attempt has succeeded."""


class Usage(NamedTuple):
    """Scheduler statistics of one thread, in nanoseconds."""

    running: int
    waiting: int
    """Time for which it was ready to run, but had no core. Includes the pool's `offered_ns`: time that threads waiting
    for others were away from cores that they had yielded, when nothing was lost."""


class ThreadPolicy:
    """Chooses the number of threads for the runs of one library. All runs must come from one thread.

    Args:
        library: its thread pool computes.
        max_threads: maximum number of threads, including the caller's.
        clock: time in seconds; replaced by tests.
        root: parent of `proc`; replaced by tests.
    """

    def __init__(
        self,
        library: NativeLibrary,
        max_threads: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        root: Path = Path("/"),
    ) -> None:
        self._ids = library.function("thread_ids", [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64)
        self._read_offered_ns = library.function("offered_ns", [], ctypes.c_int64)
        self._max = max_threads
        self._count = max_threads
        self._clock = clock
        self._proc = root / "proc"
        self._num_crowded = 0
        """Consecutive windows with too much loss."""
        self._retry_s = RETRY_S
        self._retry_at = 0.0
        self._window_start = clock()
        self._usage = self._read_usage()
        self._idle_ticks = self._read_idle_ticks()
        self._offered_ns = self._read_offered_ns()

    def choose(self, work: int) -> int:
        """Return the number of threads for the next run.

        Args:
            work: approximate number of multiplications of the run.
        """
        if work < SMALL_WORK or self._max == 1:
            return 1
        now = self._clock()
        if now - self._window_start >= WINDOW_S:
            self._end_window(now)
        return self._count

    def _end_window(self, now: float) -> None:
        """Decide from the counters of this window, and begin the next one."""
        # perf: each file is read once, for both the window that ends and the one that begins.
        usage, idle_ticks, offered_ns = self._read_usage(), self._read_idle_ticks(), self._read_offered_ns()
        idle_s = (idle_ticks - self._idle_ticks) / os.sysconf("SC_CLK_TCK")
        lost_share = _lost_share(self._usage, usage, offered_ns - self._offered_ns)
        self._reconsider(now, lost_share, idle_s / (now - self._window_start))
        self._window_start, self._usage, self._idle_ticks, self._offered_ns = now, usage, idle_ticks, offered_ns

    def _reconsider(self, now: float, lost_share: float, idle_cores: float) -> None:
        is_crowded = self._count > 1 and lost_share > LOST_SHARE / self._count
        self._num_crowded = self._num_crowded + 1 if is_crowded else 0
        if self._num_crowded == CROWDED_WINDOWS:
            self._num_crowded = 0
            self._count -= 1
            if now < self._retry_at + TRIAL_S:
                self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
            self._retry_at = now + self._retry_s
        elif self._count < self._max and now >= self._retry_at and idle_cores >= IDLE_CORES:
            self._count += 1
            self._retry_at = now
        elif now > self._retry_at + TRIAL_S:
            self._retry_s = RETRY_S

    def _read_usage(self) -> dict[int, Usage]:
        """Return the scheduler statistics by thread, without threads that have none."""
        usage = {}
        for thread in self._threads():
            try:
                words = (self._proc / f"self/task/{thread}/schedstat").read_text().split()
            except OSError:
                continue
            usage[thread] = Usage(int(words[0]), int(words[1]))
        return usage

    def _threads(self) -> list[int]:
        """Return the ids of the caller and of the pool's threads that were started."""
        numbers = (ctypes.c_int64 * self._max)()
        return [threading.get_native_id(), *numbers[: self._ids(numbers, self._max)]]

    def _read_idle_ticks(self) -> int:
        """Return the total time for which the cores of these threads were idle or waiting for a disk, in clock
        ticks."""
        cores: set[str] = set()
        for thread in self._threads():
            # A bound caller may run on one core only, which it keeps busy itself.
            with contextlib.suppress(ProcessLookupError):
                cores |= {f"cpu{number}" for number in os.sched_getaffinity(thread)}
        try:
            lines = (self._proc / "stat").read_text().splitlines()
        except OSError:
            return 0
        fields = [line.split() for line in lines]
        return sum(int(words[4]) + int(words[5]) for words in fields if words[0] in cores)


def _lost_share(before: dict[int, Usage], now: dict[int, Usage], offered_ns: int) -> float:
    """Return the total time that threads lost waiting for cores, relative to the work of the busiest thread."""
    spent = [(now[i].running - before[i].running, now[i].waiting - before[i].waiting) for i in now.keys() & before]
    busiest = max((running + waiting for running, waiting in spent), default=0)
    return max(0, sum(waiting for _, waiting in spent) - offered_ns) / busiest if busiest else 0.0


def bind_threads(library: NativeLibrary, cpus: Sequence[int]) -> None:
    """Bind the calling thread to the first core, and the pool's threads to the others, one each.

    Raises:
        OSError: the system refuses, because a core does not exist or this process may not use it.
    """
    bind = library.function("bind_threads", [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int32)
    error = bind((ctypes.c_int64 * len(cpus))(*cpus), len(cpus))
    if error:
        raise OSError(error, f"cannot bind threads to the cores {list(cpus)}: {os.strerror(error)}")
