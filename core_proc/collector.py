"""Schedules Python's cyclic garbage collector in the core: full collections run only while the engine is idle.

A full collection visits every container, several for each request that waits: with 100,000 of them the step loop would
stand still for half a second. The core frees what it uses by reference counts; the cycles that are left for the
collector come from exceptions and are rare.
"""

import gc

NEVER = 2**31 - 1
YOUNG_THRESHOLD = 10_000
"""Allocations between two collections of the youngest generation, which are short."""
MIDDLE_THRESHOLD = 10
MIN_INTERVAL_S = 10.0
"""Time between two full collections, for an engine that falls idle after each of many short requests."""


class IdleCollector:
    """Takes over the full collections of this process."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def start(self) -> None:
        """Collect once, exempt everything that lives now, and run no further full collection by itself."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_THRESHOLD, MIDDLE_THRESHOLD, NEVER)

    def on_idle(self, now: float) -> None:
        """Run a full collection, unless the last one was a moment ago; called when the last request has ended."""
        if now >= self._next_s:
            self._next_s = now + MIN_INTERVAL_S
            gc.collect()
