"""`WakeEvent`: wakes the one task that waits for events of a request."""

import asyncio
from collections.abc import Awaitable, Generator


class WakeEvent:
    """An event with a single waiter, on a single loop.

    It is cheaper than `asyncio.Event`, which looks up its loop at every wait and keeps a queue of waiters. A wait may
    end although nothing new has come since the last one.
    """

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the waiter, now or as soon as there is one."""
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():  # done: its task was cancelled
            self._is_set = True
        else:
            waiter.set_result(None)

    def clear(self) -> None:
        """Reset it: the waiter is about to handle everything that has arrived."""
        self._is_set = False

    def wait(self) -> Awaitable[None]:
        """Return an awaitable that is done at the next `set`, or at once if there was one since the last wait."""
        if self._is_set:
            self._is_set = False
            return _DONE
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter


class _Done:
    """An awaitable that is done already: awaiting it does not yield to the event loop."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


_DONE = _Done()
