"""Schedules Python's cyclic garbage collector in the core: full collections run only while it is idle, if possible.

A full collection visits every container, and each waiting request has several: with 100,000 waiting requests the step
loop would stall for half a second. The core frees memory by reference counts; the cycles left for the collector come
from exceptions and are rare. A core that is never idle still runs a full collection occasionally, so that garbage does
not grow without limit.
"""

import gc
import math

NEVER = 2**31 - 1
YOUNG_THRESHOLD = 10_000
"""Allocations between two collections of the youngest generation, which are short."""
MIDDLE_THRESHOLD = 2
"""Collections of the youngest generation between two of the middle generation, which take about 6 ms each."""
MIN_INTERVAL_S = 10.0
"""Least seconds between two full collections, for an engine that becomes idle after each of many short requests."""
MAX_INTERVAL_S = 600.0
"""Seconds after which a busy core runs a full collection."""
MAX_GROWTH = 200
"""Collections of the middle generation after which a busy core runs a full collection. By then about 6 million more
containers were allocated than freed, several times as many as a long queue has."""


class IdleCollector:
    """Controls when this process runs full collections."""

    def __init__(self) -> None:
        self._last_s = math.inf

    def start(self, now: float) -> None:
        """Collect once, freeze all objects that exist now, and disable automatic full collections."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_THRESHOLD, MIDDLE_THRESHOLD, NEVER)
        self._last_s = now

    def poll(self, now: float, *, is_idle: bool) -> None:
        """Run a full collection if it is due. Called about once a second, and when the last request has ended."""
        elapsed_s = now - self._last_s
        if is_idle:
            is_due = elapsed_s >= MIN_INTERVAL_S
        else:
            is_due = elapsed_s >= MAX_INTERVAL_S or gc.get_count()[2] >= MAX_GROWTH
        if is_due:
            self._last_s = now
            gc.collect()
