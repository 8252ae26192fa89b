"""`BackgroundTasks`: work that no connection waits for. The server drains and aborts it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)


class BackgroundTasks:
    """The tasks of one HTTP process that outlive their requests."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        """Running tasks. The server adds its own, and waits for all of them before it ends."""
        self.is_draining = False
        """Whether the server is draining; if so, start no new work."""
        self._on_drain: list[Callable[[], None]] = []
        self._on_abort: list[Callable[[], None]] = []

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run `work` in a task. An unexpected error is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def on_drain(self, callback: Callable[[], None]) -> None:
        """Register a callback for the moment when the server begins to drain."""
        self._on_drain.append(callback)

    def on_abort(self, callback: Callable[[], None]) -> None:
        """Register a callback that runs before the server aborts all requests."""
        self._on_abort.append(callback)

    def drain(self) -> None:
        """Begin to drain, and run the registered callbacks."""
        self.is_draining = True
        for callback in self._on_drain:
            callback()

    def abort(self) -> None:
        """Drain, and abort all work now."""
        self.drain()
        for callback in self._on_abort:
            callback()

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a background task failed", exc_info=error)
