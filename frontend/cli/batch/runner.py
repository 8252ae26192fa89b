"""Answers the lines of a batch through the server's own routes, many at a time. Opens no file and starts no engine."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Protocol

import msgspec

from octavo.frontend.cli.batch.lines import ID_PREFIX, Answered, BadLine, BatchRequest, BatchResult, Failure
from octavo.frontend.cli.errors import CommandError
from octavo.frontend.http.message import Request, Response
from octavo.protocol.errors import EngineDeadError

logger = logging.getLogger(__name__)

RETRY_S = 0.2
"""How long a request waits that the engine has no room for."""


class Application(Protocol):
    """What answers the requests: `App`."""

    async def answer(self, request: Request) -> Response:
        """Return the answer to a request."""

    def failure(self, request: Request, error: Exception) -> Response:
        """Return the answer to a request that failed unexpectedly."""


class Engine(Protocol):
    """The part of `AsyncClient` that is needed here."""

    @property
    def failure(self) -> EngineDeadError | None:
        """Why no request can be served any more; None while the engine lives."""


class _ErrorDetail(msgspec.Struct):
    message: str
    type: str


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail


async def answer_lines(
    app: Application,
    engine: Engine,
    lines: Iterable[BatchRequest | BadLine],
    write: Callable[[BatchResult], None],
    max_in_flight: int,
) -> None:
    """Answer every line; results are written in the order in which they are ready.

    A line that cannot be answered gets a result that says why, and ends nothing.

    Args:
        app: what answers.
        engine: under it.
        lines: taken one by one as there is room.
        write: called with each result.
        max_in_flight: most requests at a time.

    Raises:
        EngineDeadError: the engine is gone; lines without a result can be tried again.
        CommandError: a result cannot be written; likewise.
        BrokenPipeError: nobody reads the results.
    """
    gate = asyncio.Semaphore(max_in_flight)

    async def answer(line: BatchRequest) -> None:
        try:
            write(await _answer(app, engine, line))
        finally:
            gate.release()

    try:
        async with asyncio.TaskGroup() as group:
            for line in lines:
                if isinstance(line, BadLine):
                    write(_bad_line(line))
                    continue
                await gate.acquire()
                group.create_task(answer(line))
    except* (EngineDeadError, CommandError, BrokenPipeError) as several:
        raise several.exceptions[0] from None


async def _answer(app: Application, engine: Engine, line: BatchRequest) -> BatchResult:
    response = await _ask(app, line)
    while response.status == HTTPStatus.SERVICE_UNAVAILABLE and not engine.failure:
        await asyncio.sleep(RETRY_S)
        response = await _ask(app, line)
    if engine.failure:
        raise engine.failure
    body = response.body or b"null"  # `/ping` answers with nothing, which is no JSON
    answered = Answered(response.status, line.request_id, msgspec.Raw(body))
    error = None if response.status < HTTPStatus.BAD_REQUEST else _failure(line, response)
    return BatchResult(f"{ID_PREFIX}{line.number}", line.custom_id, answered, error)


async def _ask(app: Application, line: BatchRequest) -> Response:
    request = Request("POST", line.url, {b"x-request-id": line.request_id.encode()})
    request.body = line.body
    try:
        return await app.answer(request)
    except Exception as error:  # a fault of ours in one line must not lose the others
        logger.exception("line %d failed", line.number)
        return app.failure(request, error)


def _failure(line: BatchRequest, response: Response) -> Failure:
    try:
        detail = msgspec.json.decode(response.body, type=_ErrorBody).error
    except msgspec.DecodeError:
        detail = _ErrorDetail(HTTPStatus(response.status).phrase, "")
    return Failure(detail.type or str(response.status), f"line {line.number}: {detail.message}")


def _bad_line(line: BadLine) -> BatchResult:
    failure = Failure("invalid_line", f"line {line.number}: {line.reason}")
    return BatchResult(f"{ID_PREFIX}{line.number}", line.custom_id, None, failure)
