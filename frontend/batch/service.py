"""`BatchService`: runs the batches of `--batch-dir` through the routes of this server, one batch at a time.

All batches are validated immediately, and waiting batches can be cancelled. Their requests are answered in turn.

Each HTTP process has a service; the one that holds the directory's lock runs all batches. When that process ends,
another one takes over. Results on disk are not computed again, even after a restart of the server.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from octavo.frontend.batch.batch_run import BatchRun
from octavo.frontend.batch.directory import BatchDirectory
from octavo.frontend.batch.runner import EngineLiveness
from octavo.frontend.calls.services import Tenants
from octavo.frontend.cli.errors import CommandError
from octavo.frontend.http.background import BackgroundTasks
from octavo.protocol.errors import EngineDeadError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Interval in seconds at which a process looks for changed batches, tries to take over, and saves progress."""

RETRY_S = 60.0
"""Seconds before a batch is retried whose results cannot be written, for instance because the disk is full."""

SWEEP_S = 600.0
"""Interval in seconds at which obsolete files are removed."""

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/score",
    "/v1/rerank",
)
"""Routes that a batch may call."""


class BatchService:
    """Runs batches.

    Args:
        directory: contains the batches.
        tasks: tasks of the server, which waits for requests in flight before it exits.
        tenants: tenants of the server; their limits apply to their batches. `None` if there are none.
    """

    def __init__(self, directory: BatchDirectory, tasks: BackgroundTasks, tenants: Tenants | None = None) -> None:
        self.directory = directory
        self._tasks = tasks
        self._tenants = tenants
        self._wake = asyncio.Event()
        self._work: asyncio.Task[None] | None = None
        """Task that answers the requests of the current batch."""
        self._ended: set[str] = set()
        """Ids of batches that have ended."""
        self._running: dict[str, asyncio.Task[None]] = {}
        """Task of each batch that is being validated, waiting, answered or finished."""
        self._queue: list[BatchRun] = []
        """Batches that are ready to be answered."""
        self._retry_at_s: dict[str, float] = {}
        """Monotonic time at which to retry a batch that failed."""
        self._sweep_at_s = 0.0
        self._logged = ""
        """Latest error of the directory; each is logged once."""

    def start(self, app: "ASGIApp", engine: EngineLiveness, max_in_flight: int) -> None:
        """Begin to run batches.

        Args:
            app: handles the requests; needs no key.
            engine: the engine behind it.
            max_in_flight: maximum number of concurrent requests. Keep it below the engine's capacity, so that other
                requests need not wait.
        """
        self._tasks.on_drain(self._wake.set)
        self._tasks.on_abort(self._stop)
        self._tasks.start(self._run(app, engine, max_in_flight))

    def wake(self) -> None:
        """Look for work immediately."""
        self._wake.set()

    async def _run(self, app: "ASGIApp", engine: EngineLiveness, max_in_flight: int) -> None:
        """Wait for the directory's lock, then run batches until the server drains."""
        while not self._tasks.is_draining:
            with self._errors_logged(), self.directory.lock() as is_ours:
                while is_ours and not self._tasks.is_draining:
                    with self._errors_logged():
                        await self._advance_batches(app, engine, max_in_flight)
                    await self._sleep()
                while self._running:  # the lock is kept as long as they write
                    await asyncio.wait(self._running.values())
            await self._sleep()

    async def _advance_batches(self, app: "ASGIApp", engine: EngineLiveness, max_in_flight: int) -> None:
        """Begin or continue unfinished batches; remove obsolete files.

        Raises:
            OSError: the directory cannot be read.
        """
        for batch_id in await asyncio.to_thread(self.directory.unfinished, self._ended):
            if batch_id not in self._running and self._retry_at_s.get(batch_id, 0.0) <= time.monotonic():
                work = self._run_batch(batch_id, app, engine, max_in_flight)
                self._running[batch_id] = self._tasks.start(work)
        if self._sweep_at_s <= time.monotonic():
            await asyncio.to_thread(self.directory.sweep)
            self._sweep_at_s = time.monotonic() + SWEEP_S

    @contextmanager
    def _errors_logged(self) -> Iterator[None]:
        """Log file system errors and continue: they may pass, and no other process would run the batches."""
        try:
            yield
        except OSError as error:
            if str(error) != self._logged:
                self._logged = str(error)
                logger.error("cannot look for batches in --batch-dir, trying again each %g s: %s", POLL_S, error)

    async def _sleep(self) -> None:
        if self._tasks.is_draining:
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), POLL_S)
        self._wake.clear()

    async def _run_batch(self, batch_id: str, app: "ASGIApp", engine: EngineLiveness, max_in_flight: int) -> None:
        """Take a batch through as many of its steps as possible."""
        try:
            run = BatchRun(self.directory, batch_id, self._tasks, self._tenants)
            try:
                if await run.validate():
                    with suppress(EngineDeadError):  # the server exits, and the next one continues
                        await self._answer_in_turn(run, app, engine, max_in_flight)
                    if run.is_complete or run.should_end():
                        await run.finish()
            finally:
                await asyncio.to_thread(run.close)
            self._retry_at_s.pop(batch_id, None)
        except Exception as error:
            self._retry_at_s[batch_id] = time.monotonic() + RETRY_S
            is_expected = isinstance(error, CommandError | OSError)
            message = "batch %s goes on in %g s: %s"
            logger.error(message, batch_id, RETRY_S, error, exc_info=None if is_expected else error)
        finally:
            del self._running[batch_id]

    def _stop(self) -> None:
        """Leave unanswered requests to the next start: an aborted response is not a result."""
        if self._work is not None:
            self._work.cancel()

    async def _answer_in_turn(self, run: BatchRun, app: "ASGIApp", engine: EngineLiveness, max_in_flight: int) -> None:
        """Answer the lines of a batch whenever it is the oldest one that need not wait for its tenant's limits."""
        self._queue.append(run)
        try:
            while not run.is_complete and not run.should_end() and not self._tasks.is_draining:
                if self._work is None and run is self._next():
                    await self._answer(run, app, engine, max_in_flight)
                else:
                    await asyncio.sleep(POLL_S)
        finally:
            self._queue.remove(run)

    def _next(self) -> BatchRun | None:
        now_s = time.monotonic()
        ready = [run for run in self._queue if run.paused_until_s <= now_s]
        return min(ready, key=lambda run: run.order, default=None)

    async def _answer(self, run: BatchRun, app: "ASGIApp", engine: EngineLiveness, max_in_flight: int) -> None:
        """Answer lines until all have a result, the batch must wait, is cancelled or expires, or the server exits."""
        work = self._work = asyncio.create_task(run.answer(app, engine, max_in_flight))
        try:
            while not work.done():
                await asyncio.wait([work], timeout=POLL_S)
                if run.should_end():
                    work.cancel()
                await run.save_progress()
            await run.save_progress()  # for lines answered while the progress was being saved
            if not work.cancelled():
                work.result()
        finally:
            work.cancel()
            await asyncio.wait([work])  # no request may write a result after its file is closed
            self._work = None
