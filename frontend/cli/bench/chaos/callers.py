"""Callers of one kind each: one asks over HTTP, one as an application that has joined the engine.

Each asks in the manner it is told, and tells what became of it. Neither asks anything twice.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol
from urllib.parse import urlsplit

from octavo.frontend.cli.bench.chaos.answers import Answer, Garbled, StreamedAnswer, whole_answer
from octavo.frontend.cli.bench.chaos.jobs import Fate, Job, Kind, Place, Result
from octavo.frontend.cli.bench.http_connection import READ_LIMIT_BYTES, HttpConnection
from octavo.frontend.client import AsyncClient
from octavo.frontend.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from octavo.protocol.errors import OctavoError
from octavo.protocol.params import OutputKind, SamplingParams
from octavo.protocol.structured import StructuredOutputsParams

_PATHS = {Kind.COMPLETIONS: "/v1/completions", Kind.CHAT: "/v1/chat/completions"}
_OK = 200
_DATA = b"data: "


class Refused(Exception):
    """The engine, or its server, answered with an error."""


class Caller(Protocol):
    """Asks one kind of request."""

    async def ask(self, job: Job) -> tuple[Fate, Answer]:
        """Ask, and read the answer as the job says; returns how it ended, and what was read.

        Raises:
            OSError, EOFError: the connection broke.
            Refused: the answer is an error.
            Garbled: the answer cannot be understood.
        """

    async def close(self) -> None:
        """Leave the engine."""


async def result_of(caller: Caller, job: Job, timeout_s: float) -> Result:
    """Have a job done, and return what became of it, whatever that is.

    Args:
        caller: of its kind.
        job: to be done.
        timeout_s: that it may take.
    """
    answer: Answer | None = None
    detail = ""
    try:
        async with asyncio.timeout(timeout_s):
            fate, answer = await caller.ask(job)
    except TimeoutError:
        fate, detail = Fate.FAILED, f"no answer within {timeout_s:g} s"
    except (OSError, EOFError) as error:
        fate, detail = Fate.BROKEN, f"{type(error).__name__}: {error}"
    except (Refused, Garbled, ValueError, KeyError, asyncio.LimitOverrunError) as error:
        fate, detail = Fate.FAILED, f"{type(error).__name__}: {error}"
    return Result(job.number, fate, answer, detail, time.monotonic())


class HttpCaller:
    """Asks an HTTP server, on a connection of its own for each request.

    Args:
        place: where it listens.
    """

    def __init__(self, place: Place) -> None:
        parts = urlsplit(place.url)
        self._host, self._port = parts.hostname or "", parts.port or 80

    async def ask(self, job: Job) -> tuple[Fate, Answer]:
        """See `Caller`."""
        body = dict(job.request.body)
        if job.manner.is_streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        connection = HttpConnection(*await asyncio.open_connection(self._host, self._port, limit=READ_LIMIT_BYTES))
        try:
            status = await connection.ask(self._frame(_PATHS[job.request.kind], json.dumps(body).encode()))
            if status != _OK:
                raise Refused(f"HTTP {status}: {(await _whole(connection))[:500].decode(errors='replace')}")
            if job.manner.is_streamed:
                return await _read_stream(connection, job)
            return Fate.ANSWERED, whole_answer(json.loads(await _whole(connection)))
        finally:
            connection.close()

    async def close(self) -> None:
        """Nothing is held between requests."""

    def _frame(self, path: str, body: bytes) -> bytes:
        head = f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        return f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def _whole(connection: HttpConnection) -> bytes:
    return b"".join([piece async for piece in connection.body()])


async def _read_stream(connection: HttpConnection, job: Job) -> tuple[Fate, Answer]:
    """Read a stream to its end, or as far as the job says."""
    answer = StreamedAnswer()
    num_pieces = 0
    has_end = False
    async with contextlib.aclosing(_events(connection)) as events:
        async for event in events:
            if event == b"[DONE]":
                answer.end()
                has_end = True
                continue
            chunk = json.loads(event)
            if "error" in chunk:
                raise Refused(f"an event of the stream says: {chunk['error']}")
            answer.take(chunk)
            num_pieces += 1
            if num_pieces == job.manner.leaves_after:
                return Fate.LEFT, answer.told
            if job.manner.pause_s:
                await asyncio.sleep(job.manner.pause_s)
    if not has_end:
        raise EOFError("the stream has no end")
    return Fate.ANSWERED, answer.told


async def _events(connection: HttpConnection) -> AsyncGenerator[bytes]:
    rest = b""
    async for piece in connection.body():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                yield line.removeprefix(_DATA)


class JoinedCaller:
    """Asks through an `AsyncClient` that has joined the engine.

    Args:
        client: of the engine.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def ask(self, job: Job) -> tuple[Fate, Answer]:
        """See `Caller`."""
        body, manner = job.request.body, job.manner
        kind = OutputKind.DELTA if manner.is_streamed else OutputKind.FINAL_ONLY
        answer = _JoinedAnswer()
        name = body.get("request_id") or f"job-{job.number}"
        outputs = self._client.generate(
            body["prompt"],
            _params(body["params"], kind),
            request_id=name,
            priority=body["priority"],
            cache_salt=body.get("cache_salt"),
        )
        num_pieces = 0
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    answer.take(output)
                    num_pieces += 1
                    if num_pieces == manner.leaves_after:
                        return Fate.LEFT, answer.told
                    if num_pieces == manner.aborts_after:
                        outputs_left = not output.finished
                        await self._client.abort(name)
                        if outputs_left:
                            return Fate.ABORTED, await answer.rest(outputs)
                    if manner.pause_s:
                        await asyncio.sleep(manner.pause_s)
        except OctavoError as error:
            raise Refused(f"{type(error).__name__}: {error}") from None
        answer.end()
        return Fate.ANSWERED, answer.told

    async def close(self) -> None:
        """See `Caller`."""
        await self._client.close()


def _params(said: dict[str, Any], kind: OutputKind) -> SamplingParams:
    said = dict(said)
    if form := said.pop("structured_outputs", None):
        said["structured_outputs"] = StructuredOutputsParams(**form)
    if biases := said.pop("logit_bias", None):
        said["logit_bias"] = {int(token_id): bias for token_id, bias in biases.items()}
    return SamplingParams(**said, output_kind=kind)


class _JoinedAnswer:
    """Puts outputs together."""

    def __init__(self) -> None:
        self._choices: dict[int, dict[str, Any]] = {}
        self._prompt_logprobs: list[Any] | None = None
        self._num_prompt_tokens = 0
        self._is_over = False

    @property
    def told(self) -> Answer:
        """What the outputs so far say."""
        num_tokens = sum(len(choice["token_ids"]) for choice in self._choices.values())
        return {
            "choices": [self._choices[index] for index in sorted(self._choices)],
            "prompt_logprobs": self._prompt_logprobs,
            "usage": {"prompt_tokens": self._num_prompt_tokens, "completion_tokens": num_tokens},
        }

    def take(self, output: RequestOutput) -> None:
        """Add an output.

        Raises:
            Garbled: it, or one of its sequences, is over.
        """
        if self._is_over:
            raise Garbled("the request goes on after its end")
        self._is_over = output.finished
        self._num_prompt_tokens = len(output.prompt_token_ids)
        if output.prompt_logprobs is not None:
            if self._prompt_logprobs is not None:
                raise Garbled("the prompt's logprobs are told twice")
            self._prompt_logprobs = [_logprobs(position) for position in output.prompt_logprobs]
        for sequence in output.outputs:
            self._take_sequence(sequence)

    def _take_sequence(self, sequence: CompletionOutput) -> None:
        index = sequence.index
        choice = self._choices.setdefault(
            index, {"index": index, "text": "", "token_ids": [], "logprobs": [], "finish_reason": None}
        )
        if choice["finish_reason"] is not None:
            raise Garbled(f"sequence {index} goes on after its end")
        choice["text"] += sequence.text
        choice["token_ids"] += sequence.token_ids
        choice["logprobs"] += [_logprobs(position) for position in sequence.logprobs or ()]
        choice["cumulative_logprob"] = sequence.cumulative_logprob
        choice["finish_reason"] = sequence.finish_reason
        choice["stop_reason"] = sequence.stop_reason

    async def rest(self, outputs: AsyncIterator[RequestOutput]) -> Answer:
        """Read what an aborted request still has to say.

        Raises:
            Garbled: it does not end.
        """
        async for output in outputs:
            self.take(output)
        self.end()
        return self.told

    def end(self) -> None:
        """There are no more outputs.

        Raises:
            Garbled: there should be.
        """
        if not self._is_over or any(choice["finish_reason"] is None for choice in self._choices.values()):
            raise Garbled("the request is over before its end")


def _logprobs(position: PositionLogprobs | None) -> list[Any] | None:
    if position is None:
        return None
    return [[token_id, entry.logprob, entry.rank, entry.decoded_token] for token_id, entry in position.items()]
