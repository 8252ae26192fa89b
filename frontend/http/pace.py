"""`Pace`: how much of what has arrived is taken up in one turn of the event loop.

Ten thousand requests may arrive at once. Taken up all together they would keep the loop busy for seconds, in which
nobody else is heard: not a probe, not the engine, not a caller who leaves. Knows nothing of HTTP.
"""

import asyncio
from collections import deque
from collections.abc import Callable

MAX_AT_ONCE = 8
"""Pieces of work in one turn: a few milliseconds, as each may begin a request."""


class Pace:
    """Does pieces of work at once while there are few, and in order, some in each turn, when there are many.

    Call everything on the loop that is running when it is made.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Callable[[], None]] = deque()
        self._num_done = 0
        """In this turn."""

    def do(self, work: Callable[[], None]) -> None:
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
