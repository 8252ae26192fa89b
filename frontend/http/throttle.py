"""`Throttle`: limits how much arrived work starts in one iteration of the event loop.

Ten thousand requests may arrive at once. Started together, they would block the loop for seconds: probes, the engine's
events and disconnects would wait. Knows nothing of HTTP.
"""

import asyncio
from collections import deque
from collections.abc import Callable

MAX_AT_ONCE = 8
"""Pieces of work per iteration: a few milliseconds, because each may start a request."""


class Throttle:
    """Runs work at once while there is little, and in order, `MAX_AT_ONCE` per iteration, when there is much.

    All calls must come from the loop that runs when it is created.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Callable[[], None]] = deque()
        self._num_done = 0
        """In this turn."""

    def run(self, work: Callable[[], None]) -> None:
        """Do `work` now or in one of the next turns, after everything that came before it."""
        if self._num_done == 0:
            self._loop.call_soon(self._on_next_turn)
        if self._queue or self._num_done == MAX_AT_ONCE:
            self._queue.append(work)
        else:
            self._num_done += 1
            work()

    def _on_next_turn(self) -> None:
        self._num_done = 0
        if self._queue:
            self._loop.call_soon(self._on_next_turn)
        while self._queue and self._num_done < MAX_AT_ONCE:
            self._num_done += 1
            self._queue.popleft()()
