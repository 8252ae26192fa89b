"""`WakeEvent`: wakes the task that waits for events of its requests. `WakeQueue` decides the order."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Generator

MAX_AT_ONCE = 32
"""Number of consumers woken per iteration of the event loop: about a millisecond of work if each sends one token."""


class WakeQueue:
    """Wakes consumers in order, `MAX_AT_ONCE` per iteration of the event loop.

    Tens of thousands of requests may get tokens, fail or be aborted at once. If all of their consumers ran in one
    iteration, health probes would wait for seconds. One queue serves one event loop.
    """

    def __init__(self) -> None:
        self._due: deque[WakeEvent] = deque()

    def add(self, event: "WakeEvent") -> None:
        """Wake the consumer of an event, after all consumers that were added before."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._wake_some)
        self._due.append(event)

    def _wake_some(self) -> None:
        for _ in range(min(len(self._due), MAX_AT_ONCE)):
            self._due.popleft().wake()
        if self._due:
            asyncio.get_running_loop().call_soon(self._wake_some)


class WakeEvent:
    """An event with a single waiter.

    It is cheaper than `asyncio.Event`, which keeps a queue of waiters. Wake-ups can be spurious: a wait may end
    although nothing new has arrived.
    """

    __slots__ = ("_is_set", "_queue", "_waiter")

    def __init__(self, queue: WakeQueue) -> None:
        self._queue = queue
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Schedule the waiter, unless that has happened since the last `clear`."""
        if not self._is_set:
            self._is_set = True
            self._queue.add(self)

    def clear(self) -> None:
        """Reset the event: the waiter is about to handle everything that has arrived."""
        self._is_set = False

    def wake(self) -> None:
        """Wake the waiter, unless it has cleared the event meanwhile."""
        if self._is_set and self._waiter is not None and not self._waiter.done():  # done: its task was cancelled
            self._waiter.set_result(None)

    def wait(self) -> Awaitable[None]:
        """Return an awaitable that is done once the event is set; immediately if it already is."""
        if self._is_set:
            return _DONE
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter


class _Done:
    """An awaitable that is already done: awaiting it does not yield to the event loop."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


_DONE = _Done()
