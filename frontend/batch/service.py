"""`BatchService`: runs the batches of `--batch-dir` through the routes of this server, one after the other.

All batches are validated at once, and a batch that waits can be cancelled; their requests are answered in turn.

Each HTTP process has one. A batch belongs to the process that holds its lock, and any process takes over a batch whose
process has ended: after a restart of the server, results that are on disk are not computed again.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from octavo.frontend.batch.directory import FINAL, BatchDirectory
from octavo.frontend.batch.lines import BadLine, BatchRequest, BatchResult, Failure, read_lines
from octavo.frontend.batch.results_file import ResultsFile
from octavo.frontend.batch.runner import EngineLiveness, answer_lines
from octavo.frontend.cli.errors import CommandError
from octavo.frontend.http.background import BackgroundTasks
from octavo.frontend.http.schemas.batches import BatchError, BatchErrors, RequestCounts
from octavo.protocol.errors import EngineDeadError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

logger = logging.getLogger(__name__)

MAX_LINES = 50_000
"""Requests of one batch, as in OpenAI's API."""

MAX_ERRORS = 100
"""Invalid lines that a failed batch names."""

TURN = "turn"
"""Name of the lock of the batch whose requests are answered."""

POLL_S = 1.0
"""How often a process looks for cancelled batches, for those of processes that have ended, and writes progress."""

RETRY_S = 60.0
"""How long a batch waits whose results cannot be written, for instance because the disk is full."""

EXPIRED = Failure("batch_expired", "the batch expired before this request was answered: send it in a new batch")

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
        directory: has them.
        tasks: of the server, which waits for requests in flight before it ends.
    """

    def __init__(self, directory: BatchDirectory, tasks: BackgroundTasks) -> None:
        self.directory = directory
        self._tasks = tasks
        self._wake = asyncio.Event()
        self._work: asyncio.Task[None] | None = None
        """Answers the requests of the batch that runs."""
        self._ended: set[str] = set()
        """Batches that need no further look."""
        self._running: set[str] = set()
        """Batches of this process: they are validated, wait for their turn, are answered or end."""
        self._queue: list[int] = []
        """The places in the order of batches of those that want to be answered."""
        self._retry_at: dict[str, float] = {}
        """When to go on with batches that could not."""

    def start(self, app: "ASGIApp", engine: EngineLiveness, max_in_flight: int) -> None:
        """Begin to run batches.

        Args:
            app: answers the requests; needs no key.
            engine: the engine behind it.
            max_in_flight: limit on concurrent requests. Less than the engine holds, so that others need not wait.
        """
        self._tasks.on_drain(self._wake.set)
        self._tasks.on_abort(self._stop)
        self._tasks.start(self._run(app, engine, max_in_flight))

    def wake(self) -> None:
        """Look for work now."""
        self._wake.set()

    async def _run(self, app: "ASGIApp", engine: EngineLiveness, max_in_flight: int) -> None:
        while not self._tasks.is_draining:
            self._wake.clear()
            for batch_id in await asyncio.to_thread(self._unfinished):
                if batch_id not in self._running and self._retry_at.get(batch_id, 0.0) <= time.monotonic():
                    self._running.add(batch_id)
                    self._tasks.start(self._run_batch(batch_id, app, engine, max_in_flight))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), POLL_S)

    async def _run_batch(self, batch_id: str, app: "ASGIApp", engine: EngineLiveness, max_in_flight: int) -> None:
        """Take a batch as far as possible, unless another process has it."""
        try:
            with self.directory.lock(batch_id) as is_ours:
                if is_ours:
                    await _BatchRun(self, batch_id).run(app, engine, max_in_flight)
        except Exception as error:
            self._retry_at[batch_id] = time.monotonic() + RETRY_S
            is_expected = isinstance(error, CommandError | OSError)
            message = "batch %s goes on in %g s: %s"
            logger.error(message, batch_id, RETRY_S, error, exc_info=None if is_expected else error)
        finally:
            self._running.discard(batch_id)

    def _unfinished(self) -> list[str]:
        """Return the batches that have not ended, the oldest first."""
        found = self.directory.batches()
        self._ended |= {one.batch.id for one in found if one.batch.status in FINAL}
        return [one.batch.id for one in found if one.batch.id not in self._ended]

    def _stop(self) -> None:
        """Leave unanswered requests to the next start: an aborted answer is no result."""
        if self._work is not None:
            self._work.cancel()

    async def answer_in_turn(
        self, run: "_BatchRun", app: "ASGIApp", engine: EngineLiveness, max_in_flight: int
    ) -> None:
        """Answer the lines of a batch when it is the oldest one and no process answers those of another."""
        self._queue.append(run.order)
        try:
            while not run.should_end() and not self._tasks.is_draining:
                if run.order == min(self._queue):
                    with self.directory.lock(TURN) as has_turn:
                        if has_turn:
                            await self._answer(run, app, engine, max_in_flight)
                            return
                await asyncio.sleep(POLL_S)
        finally:
            self._queue.remove(run.order)

    async def _answer(self, run: "_BatchRun", app: "ASGIApp", engine: EngineLiveness, max_in_flight: int) -> None:
        """Answer lines until all have a result, the batch is cancelled or expires, or the server ends."""
        work = answer_lines(app, engine, run.lines(self._tasks), run.write, max_in_flight)
        self._work = asyncio.create_task(work)
        try:
            while not self._work.done():
                await asyncio.wait([self._work], timeout=POLL_S)
                if run.should_end():
                    self._work.cancel()
                run.save_progress()
            if not self._work.cancelled():
                self._work.result()
        finally:
            self._work.cancel()
            self._work = None


class _BatchRun:
    """One batch, from its validation to its end. Its lock is held."""

    def __init__(self, service: BatchService, batch_id: str) -> None:
        stored = service.directory.batch(batch_id)
        assert stored is not None, "batches are never removed"
        self._service = service
        self._directory = service.directory
        self._stored = stored
        self._batch = stored.batch
        self._saved: bytes = b""

    @property
    def order(self) -> int:
        """The place in the order of all batches."""
        return self._stored.order

    async def run(self, app: "ASGIApp", engine: EngineLiveness, max_in_flight: int) -> None:
        """Run it as far as possible.

        Raises:
            CommandError: its results cannot be written; it can go on later.
            OSError: its files cannot be read or written.
        """
        if self._batch.status in FINAL:  # another process was faster
            return
        if self._batch.in_progress_at is None and not await self._validate():
            return
        with ResultsFile(self._directory.results_path(self._batch.id)) as self._results:
            self._count()
            self.save_progress()
            if not self.should_end():
                with suppress(EngineDeadError):  # the server ends, and the next one goes on
                    await self._service.answer_in_turn(self, app, engine, max_in_flight)
            if self._is_complete or self.should_end():
                await asyncio.to_thread(self._finish)

    def lines(self, tasks: BackgroundTasks) -> Iterator[BatchRequest | BadLine]:
        """Yield the lines without a result, until the server ends."""
        with self._open_input() as source:
            for line in read_lines(source):
                if tasks.is_draining:
                    return
                if line.number not in self._results.done:
                    yield line

    def write(self, result: BatchResult) -> None:
        """Store a result."""
        self._results.append(result)
        self._results.done[result.number] = result.custom_id
        self._results.num_failed += result.error is not None
        self._count()

    def should_end(self) -> bool:
        """Return whether the batch was cancelled or has expired."""
        return self._directory.cancelled_at(self._batch.id) is not None or self._batch.expires_at <= time.time()

    def save_progress(self) -> None:
        """Write the record if it has changed."""
        data = msgspec.json.encode(self._stored)
        if data != self._saved:
            self._saved = data
            self._directory.put_batch(self._stored)

    @property
    def _is_complete(self) -> bool:
        return len(self._results.done) >= self._batch.request_counts.total

    def _count(self) -> None:
        counts, num_failed = self._batch.request_counts, self._results.num_failed
        counts.completed, counts.failed = len(self._results.done) - num_failed, num_failed

    async def _validate(self) -> bool:
        """Check every line; a batch with an invalid one fails as a whole, as in OpenAI's API."""
        if self._directory.file(self._batch.input_file_id) is None:
            errors = [BatchError(code="invalid_input_file", message="the input file is gone", param="input_file_id")]
        else:
            errors = await asyncio.to_thread(self._errors)
        if errors:
            self._fail(errors)
            return False
        self._batch.status, self._batch.in_progress_at = "in_progress", int(time.time())
        self.save_progress()
        return True

    def _errors(self) -> list[BatchError]:
        errors: list[BatchError] = []
        total = 0
        with self._open_input() as source:
            for line in read_lines(source):
                total += 1
                if total > MAX_LINES:
                    message = f"the file has more than {MAX_LINES} requests: send several batches"
                    return [BatchError(code="too_many_requests", message=message)]
                if isinstance(line, BadLine):
                    errors.append(BatchError(code="invalid_line", message=line.reason, line=line.number))
                elif line.url != self._batch.endpoint:
                    message = f"url {line.url!r} is not the batch's endpoint {self._batch.endpoint!r}"
                    errors.append(BatchError(code="invalid_url", message=message, line=line.number, param="url"))
                if len(errors) >= MAX_ERRORS:
                    break
        if total == 0:
            errors = [BatchError(code="empty_file", message="the file has no requests")]
        self._batch.request_counts = RequestCounts(total=total)
        return errors

    def _open_input(self) -> BinaryIO:
        return open(self._directory.content_path(self._batch.input_file_id), "rb")

    def _fail(self, errors: list[BatchError]) -> None:
        batch = self._batch
        batch.status, batch.failed_at, batch.errors = "failed", int(time.time()), BatchErrors(data=errors)
        self._directory.put_batch(self._stored)
        self._directory.clean_up(batch.id)

    def _finish(self) -> None:
        """Make the files of answers and errors. Their ids depend on the batch, so doing it twice does no harm."""
        batch, now = self._batch, int(time.time())
        cancelled_at = self._directory.cancelled_at(batch.id)
        is_expired = cancelled_at is None and not self._is_complete
        batch.status, batch.finalizing_at = "finalizing", now
        self._directory.put_batch(self._stored)
        if is_expired:
            self._expire_rest()
        self._count()
        results = self._directory.results_path(batch.id)
        batch.output_file_id = self._make_file(results, "output", has_error=False)
        batch.error_file_id = self._make_file(results, "error", has_error=True)
        if cancelled_at is not None and not self._is_complete:
            batch.status, batch.cancelling_at, batch.cancelled_at = "cancelled", cancelled_at, now
        elif is_expired:
            batch.status, batch.expired_at = "expired", now
        else:
            batch.status, batch.completed_at = "completed", now
        self._directory.put_batch(self._stored)
        self._directory.clean_up(batch.id)
        logger.info("batch %s: %s, %s", batch.id, batch.status, batch.request_counts)

    def _expire_rest(self) -> None:
        with self._open_input() as source:
            for line in read_lines(source):
                if line.number not in self._results.done:
                    self.write(BatchResult(f"batch_req_{line.number}", line.custom_id, None, EXPIRED))

    def _make_file(self, results: Path, kind: str, *, has_error: bool) -> str | None:
        """Copy the results with or without an error to a file of its own; None: there are none."""
        file_id = f"file-{self._batch.id.removeprefix('batch_')}{kind[0]}"
        path = self._directory.content_path(file_id)
        num_lines = 0
        decoder = msgspec.json.Decoder(_Error)
        with open(results, "rb") as source, open(path, "wb") as target:
            for line in source:
                if (decoder.decode(line).error is not None) == has_error:
                    target.write(line)
                    num_lines += 1
        if num_lines == 0:
            path.unlink()
            return None
        name = f"{self._batch.id}_{kind}.jsonl"
        return self._directory.register_file(file_id, name, "batch_output", self._stored.output_expiry_s).id


class _Error(msgspec.Struct):
    error: dict[str, str] | None = None
