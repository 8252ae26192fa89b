"""`Arrival`: how the link wakes the one task that waits for a request's events."""

import asyncio


class Arrival:
    """An event with one waiter, on one loop.

    `asyncio.Event` looks its loop up at every wait and keeps a queue of waiters, which is a fair part of what a
    streamed token costs.
    """

    __slots__ = ("_is_set", "_loop", "_waiter")

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        """Known from the first wait on."""
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the waiter, now or as soon as there is one."""
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait for the next `set`, or return at once if there was one since the last wait."""
        if not self._is_set:
            self._loop = self._loop or asyncio.get_running_loop()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_set = False
