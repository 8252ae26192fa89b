"""`BatchRun`: one batch, from its validation to its output and error files. Blocking work runs on threads."""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from octavo.frontend.batch.budget import LineBudget
from octavo.frontend.batch.directory import FINAL, BatchDirectory
from octavo.frontend.batch.lines import BadLine, BatchRequest, BatchResult, Failure, read_lines
from octavo.frontend.batch.results_file import ResultsFile
from octavo.frontend.batch.runner import EngineLiveness, answer_lines
from octavo.frontend.batch.usage import batch_usage
from octavo.frontend.calls.services import Tenants
from octavo.frontend.http.background import BackgroundTasks
from octavo.frontend.http.schemas.batches import BatchError, BatchErrors, RequestCounts

if TYPE_CHECKING:
    from starlette.types import ASGIApp

logger = logging.getLogger(__name__)

MAX_LINES = 50_000
"""Maximum number of requests of one batch, as in OpenAI's API."""

MAX_ERRORS = 100
"""Maximum number of invalid lines that a failed batch reports."""

EXPIRED = Failure("batch_expired", "the batch expired before this request was answered: send it in a new batch")


class BatchRun:
    """The steps of one batch. `BatchService` decides when they run, and closes it.

    Args:
        directory: contains the batch. This process holds its lock.
        batch_id: id of the batch.
        tasks: tasks of the server. Draining ends the run; a later run continues the batch.
        tenants: tenants of the server. `None` if it has none.
    """

    def __init__(
        self, directory: BatchDirectory, batch_id: str, tasks: BackgroundTasks, tenants: Tenants | None
    ) -> None:
        stored = directory.batch(batch_id)
        assert stored is not None, "the record of an unfinished batch stays"
        self._directory = directory
        self._tasks = tasks
        self._stored = stored
        self._batch = stored.batch
        self._budget = LineBudget(tenants, stored.tenant)
        self._saved: bytes = b""
        self._files = ExitStack()
        self._results: ResultsFile | None = None
        """`None` as long as this process has answered no line."""
        self._lines: Iterator[BatchRequest | BadLine] | None = None
        self._pending: BatchRequest | BadLine | None = None
        """A line that was read and waits for the tenant's limits."""
        self.paused_until_s = 0.0
        """Monotonic time at which to continue after a limit of the tenant was reached."""

    def close(self) -> None:
        """Close its files. Blocks until: the results are on disk."""
        self._files.close()

    @property
    def order(self) -> int:
        """Position in the order of all batches."""
        return self._stored.order

    @property
    def is_complete(self) -> bool:
        """Whether every line has a result."""
        return self._results is not None and len(self._results.done) >= self._batch.request_counts.total

    def should_end(self) -> bool:
        """Return whether the batch was cancelled or has expired."""
        return self._directory.cancelled_at(self._batch.id) is not None or self._batch.expires_at <= time.time()

    async def validate(self) -> bool:
        """Check every line, once; return whether there are lines to answer.

        A batch with an invalid line fails completely, as in OpenAI's API.

        Raises:
            OSError: the input cannot be read, or the record cannot be written.
        """
        if self._batch.status in FINAL:
            return False
        if errors := await asyncio.to_thread(self._errors):
            batch = self._batch
            batch.status, batch.failed_at, batch.errors = "failed", int(time.time()), BatchErrors(data=errors)
            await asyncio.to_thread(self._put_and_clean_up)
            return False
        if self._batch.in_progress_at is None:
            self._batch.status, self._batch.in_progress_at = "in_progress", int(time.time())
            await self.save_progress()
        return True

    async def answer(self, app: "ASGIApp", engine: EngineLiveness, max_in_flight: int) -> None:
        """Answer lines until all have a result, the server drains, or a limit of the tenant is reached.

        Raises:
            EngineDeadError: the engine died.
            CommandError: a result cannot be written.
            OSError: the input cannot be read.
        """
        await self._open_results()
        limit = self._budget.max_in_flight(max_in_flight)
        app = self._budget.for_tenant(app)
        await answer_lines(app, engine, self._next_line, self._write, limit, on_end=self._budget.end)

    async def save_progress(self) -> None:
        """Write the batch's record if it has changed."""
        data = msgspec.json.encode(self._stored)
        if data != self._saved:
            self._saved = data
            await asyncio.to_thread(self._directory.put_batch, self._stored)

    async def finish(self) -> None:
        """Write the output and error files.

        Raises:
            CommandError: the results cannot be read.
            OSError: a file cannot be written.
        """
        await self._open_results()
        await asyncio.to_thread(self._finish)

    async def _open_results(self) -> None:
        if self._results is None:
            path = self._directory.results_path(self._batch.id)
            results = await asyncio.to_thread(ResultsFile, path, remedy="make room on its disk")
            self._files.callback(results.close)
            self._results = results
            self._count()

    async def _next_line(self) -> BatchRequest | BadLine | None:
        """Return the next line without a result. `None` if there is none, or if it must not start now."""
        if self._tasks.is_draining:
            return None
        line, self._pending = self._pending or await asyncio.to_thread(self._read_line), None
        if isinstance(line, BatchRequest) and (wait_s := self._budget.begin()):
            self._pending, self.paused_until_s = line, time.monotonic() + wait_s
            return None
        return line

    def _read_line(self) -> BatchRequest | BadLine | None:
        assert self._results is not None, "open_results came first"
        if self._lines is None:
            self._lines = read_lines(self._files.enter_context(self._input.open("rb")))
        return next((line for line in self._lines if line.number not in self._results.done), None)

    def _write(self, result: BatchResult) -> None:
        assert self._results is not None, "open_results came first"
        self._results.append(result)
        self._results.done[result.number] = result.custom_id
        self._results.num_failed += result.error is not None
        self._count()

    def _count(self) -> None:
        assert self._results is not None, "open_results came first"
        counts, num_failed = self._batch.request_counts, self._results.num_failed
        counts.completed, counts.failed = len(self._results.done) - num_failed, num_failed

    @property
    def _input(self) -> Path:
        return self._directory.input_path(self._batch.id)

    def _errors(self) -> list[BatchError]:
        if not self._input.exists():
            return [BatchError(code="invalid_input_file", message="the input file is gone", param="input_file_id")]
        if self._batch.in_progress_at is not None:  # an earlier process has validated it
            return []
        errors: list[BatchError] = []
        total = 0
        with open(self._input, "rb") as source:
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

    def _put_and_clean_up(self) -> None:
        self._directory.put_batch(self._stored)
        self._directory.clean_up(self._batch.id)

    def _finish(self) -> None:
        """Write the output and error files. Their ids derive from the batch, so repeating this is harmless."""
        batch, now = self._batch, int(time.time())
        cancelled_at = self._directory.cancelled_at(batch.id)
        is_expired = cancelled_at is None and not self.is_complete
        batch.status, batch.finalizing_at = "finalizing", now
        self._directory.put_batch(self._stored)
        if is_expired:
            self._expire_rest()
        self._count()
        results = self._directory.results_path(batch.id)
        with open(results, "rb") as lines:
            batch.usage = batch_usage(lines)
        batch.output_file_id = self._make_file(results, "output", has_error=False)
        batch.error_file_id = self._make_file(results, "error", has_error=True)
        if cancelled_at is not None and not self.is_complete:
            batch.status, batch.cancelling_at, batch.cancelled_at = "cancelled", cancelled_at, now
        elif is_expired:
            batch.status, batch.expired_at = "expired", now
        else:
            batch.status, batch.completed_at = "completed", now
        self._put_and_clean_up()
        logger.info("batch %s: %s, %s", batch.id, batch.status, batch.request_counts)

    def _expire_rest(self) -> None:
        assert self._results is not None, "open_results came first"
        with open(self._input, "rb") as source:
            for line in read_lines(source):
                if line.number not in self._results.done:
                    self._write(BatchResult(f"batch_req_{line.number}", line.custom_id, None, EXPIRED))

    def _make_file(self, results: Path, kind: str, *, has_error: bool) -> str | None:
        """Copy the results with or without an error to a file of their own. `None` if there are none."""
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
        stored = self._stored
        return self._directory.register_file(file_id, name, "batch_output", stored.output_expiry_s, stored.tenant).id


class _Error(msgspec.Struct):
    error: dict[str, str] | None = None
