"""`ConnectorThread`: runs the calls of a user's connector, one after another."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol


class CallThread(Protocol):
    """Runs calls one after another, in parallel to the caller. See `ConnectorThread`."""

    @property
    def num_queued(self) -> int:
        """Number of calls that have not begun."""

    @property
    def busy_s(self) -> float:
        """Seconds for which the current call has been running; 0.0 if there is none."""

    def submit(self, call: Callable[[], object]) -> None:
        """Queue a call, which must not raise."""

    def close(self, timeout_s: float) -> bool:
        """Run the queued calls, for a bounded time. Return whether all have returned."""


class ConnectorThread:
    """A daemon thread, so that user code that never returns does not keep the process alive.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._started_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="KV connector", daemon=True)
        self._thread.start()

    @property
    def num_queued(self) -> int:
        """Number of calls that have not begun."""
        return self._calls.qsize()

    @property
    def busy_s(self) -> float:
        """Seconds for which the current call has been running; 0.0 if there is none."""
        started_s = self._started_s
        return 0.0 if started_s is None else self._clock() - started_s

    def submit(self, call: Callable[[], object]) -> None:
        """Queue a call, which must not raise."""
        self._calls.put(call)

    def close(self, timeout_s: float) -> bool:
        """Run the queued calls and end the thread. Return whether it has ended.

        Blocks until: the calls have returned, at most for `timeout_s` seconds.
        """
        self._calls.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._started_s = self._clock()
            call()
            self._started_s = None
