"""Runs the lines of a batch concurrently through the server's routes. Opens no files and starts no engine."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec

from octavo.frontend.batch.asgi_call import Response, call
from octavo.frontend.batch.lines import (
    ID_PREFIX,
    Answered,
    AnsweredRequest,
    BadLine,
    BatchRequest,
    BatchResult,
    Failure,
)
from octavo.frontend.cli.errors import CommandError
from octavo.protocol.errors import EngineDeadError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

logger = logging.getLogger(__name__)

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]
Line: TypeAlias = BatchRequest | BadLine

RECEIPT: Headers = ((b"x-octavo-receipt", b"1"),)
"""Header that requests a receipt."""

RETRY_S = 0.2
"""Seconds before a request is retried that the engine rejected as overloaded."""


class EngineLiveness(Protocol):
    """The part of `AsyncClient` that is needed here."""

    @property
    def failure(self) -> EngineDeadError | None:
        """Why the engine is dead. `None` while it is alive."""


class _ErrorDetail(msgspec.Struct):
    message: str
    type: str


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail


async def answer_lines(
    app: "ASGIApp",
    engine: EngineLiveness,
    next_line: Callable[[], Awaitable[Line | None]],
    write: Callable[[BatchResult], None],
    max_in_flight: int,
    *,
    has_receipts: bool = False,
    on_end: Callable[[], None] = lambda: None,
) -> None:
    """Run every line and write results as they become ready.

    A failed line gets a result with an error; other lines are not affected.

    Args:
        app: handles the requests.
        engine: the engine behind it.
        next_line: returns the next line, or `None` if no further line starts now. Called as earlier lines finish.
        write: called with each result.
        max_in_flight: maximum number of concurrent requests.
        has_receipts: request receipts; the results then contain their requests, too.
        on_end: called whenever a request has ended, with or without a result.

    Raises:
        EngineDeadError: the engine died; lines without a result can be retried.
        CommandError: a result cannot be written; lines without a result can be retried.
        BrokenPipeError: the reader of the results has exited.
    """
    gate = asyncio.Semaphore(max_in_flight)

    async def answer(line: BatchRequest) -> None:
        result = await _answer(app, engine, line, RECEIPT if has_receipts else ())
        if has_receipts:
            result.request = AnsweredRequest(line.url, msgspec.Raw(line.body))
        write(result)

    def on_done(task: "asyncio.Task[None]") -> None:
        gate.release()
        on_end()

    try:
        async with asyncio.TaskGroup() as group:
            while True:
                await gate.acquire()
                if (line := await next_line()) is None:
                    break
                if isinstance(line, BadLine):
                    write(_bad_line(line))
                    gate.release()
                else:
                    group.create_task(answer(line)).add_done_callback(on_done)
    except* (EngineDeadError, CommandError, BrokenPipeError) as several:
        raise several.exceptions[0] from None


def one_by_one(lines: Iterable[Line]) -> Callable[[], Awaitable[Line | None]]:
    """Return a `next_line` function for lines that can be read at any time."""
    iterator = iter(lines)

    async def next_line() -> Line | None:
        return next(iterator, None)

    return next_line


async def _answer(app: "ASGIApp", engine: EngineLiveness, line: BatchRequest, headers: Headers) -> BatchResult:
    response = await _ask(app, line, headers)
    while response.status == HTTPStatus.SERVICE_UNAVAILABLE and not engine.failure:
        await asyncio.sleep(RETRY_S)
        response = await _ask(app, line, headers)
    if engine.failure:
        raise engine.failure
    body = response.body or b"null"  # middleware may send an empty body, which is not JSON
    answered = Answered(response.status, line.request_id, msgspec.Raw(body))
    error = None if response.status < HTTPStatus.BAD_REQUEST else _failure(line, response)
    return BatchResult(f"{ID_PREFIX}{line.number}", line.custom_id, answered, error)


async def _ask(app: "ASGIApp", line: BatchRequest, headers: Headers) -> Response:
    response = await call(app, line.url, line.body, line.request_id, headers)
    if response.error is not None:  # a bug that affects one line must not lose the others
        logger.error("batch request %s (line %d) failed", line.request_id, line.number, exc_info=response.error)
    return response


def _failure(line: BatchRequest, response: Response) -> Failure:
    try:
        detail = msgspec.json.decode(response.body, type=_ErrorBody).error
    except msgspec.DecodeError:
        detail = _ErrorDetail(HTTPStatus(response.status).phrase, "")
    return Failure(detail.type or str(response.status), f"line {line.number}: {detail.message}")


def _bad_line(line: BadLine) -> BatchResult:
    failure = Failure("invalid_line", f"line {line.number}: {line.reason}")
    return BatchResult(f"{ID_PREFIX}{line.number}", line.custom_id, None, failure)
