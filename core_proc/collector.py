"""Schedules Python's cyclic garbage collector in the core: full collections, if possible, run only while it is idle.

A full collection visits every container, several for each request that waits: with 100,000 of them the step loop would
stand still for half a second. The core frees what it uses by reference counts; the cycles that are left for the
collector come from exceptions and are rare. A core that is never idle collects now and then all the same, so that
garbage does not grow without limit.
"""

import gc
import math

NEVER = 2**31 - 1
YOUNG_THRESHOLD = 10_000
"""Allocations between two collections of the youngest generation, which are short."""
MIDDLE_THRESHOLD = 2
"""Collections of the youngest between two of the middle generation, which take about 6 ms."""
MIN_INTERVAL_S = 10.0
"""Time between two full collections, for an engine that falls idle after each of many short requests."""
MAX_INTERVAL_S = 600.0
"""Time after which a busy core runs a full collection."""
MAX_GROWTH = 200
"""Collections of the middle generation after which a busy core runs a full one: about 6 million more containers were
allocated than freed, several times as many as a long queue has."""


class IdleCollector:
    """Takes over the full collections of this process."""

    def __init__(self) -> None:
        self._last_s = math.inf

    def start(self, now: float) -> None:
        """Collect once, exempt everything that lives now, and run no further full collection by itself."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_THRESHOLD, MIDDLE_THRESHOLD, NEVER)
        self._last_s = now

    def poll(self, now: float, *, is_idle: bool) -> None:
        """Run a full collection if it is due; called about once a second, and when the last request has ended."""
        elapsed_s = now - self._last_s
        if is_idle:
            is_due = elapsed_s >= MIN_INTERVAL_S
        else:
            is_due = elapsed_s >= MAX_INTERVAL_S or gc.get_count()[2] >= MAX_GROWTH
        if is_due:
            self._last_s = now
            gc.collect()
