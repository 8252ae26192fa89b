"""Garbage collection without long pauses: full collections run while few requests are live.

A full collection visits every object. With 20,000 waiting requests that takes about a second, in which the event loop
would answer no probe. Reference counting frees most objects of a request, so a full collection finds little.
"""

import gc
from collections.abc import Callable

NEW_OBJECTS = 2_000
"""New objects between two collections of the youngest generation. A request creates hundreds, and rarely a cycle."""

YOUNG_COLLECTIONS = 4
"""Collections of the youngest generation per collection of the middle one, which then takes about 5 ms."""

NEVER = 2**31 - 1

FEW_REQUESTS = 256
"""Number of live requests up to which a full collection takes only a few milliseconds."""

INTERVAL_S = 30.0
LONGEST_INTERVAL_S = 900.0
"""Maximum seconds between two full collections, for a server that always has more live requests."""


def limit_gc_pauses() -> None:
    """Exempt all existing objects from collection, and leave full collections to `FullCollections`."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, YOUNG_COLLECTIONS, NEVER)


class FullCollections:
    """Runs full collections when they are cheap.

    Args:
        num_live_requests: returns how many requests run or wait.
        now_s: current time of the monotonic clock.
    """

    def __init__(self, num_live_requests: Callable[[], int], now_s: float) -> None:
        self._num_live_requests = num_live_requests
        self._last_s = now_s

    def tick(self, now_s: float) -> None:
        """Collect if a collection is due. An idle server collects only once."""
        age_s = now_s - self._last_s
        is_good_time = age_s >= INTERVAL_S and self._num_live_requests() <= FEW_REQUESTS
        if gc.get_count()[2] and (is_good_time or age_s >= LONGEST_INTERVAL_S):
            gc.collect()
            self._last_s = now_s
