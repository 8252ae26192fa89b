"""Two kinds of clients: HTTP clients, and applications that have joined the engine.

Each sends a job once, behaves as the job says, and returns the outcome. Other code decides about retries.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol
from urllib.parse import urlsplit

from octavo.frontend.cli.bench.chaos.answers import Answer, MalformedAnswer, StreamedAnswer, pooled_answer, whole_answer
from octavo.frontend.cli.bench.chaos.jobs import ChaosJob, ChaosOutcome, EngineLocation, Kind, Result
from octavo.frontend.cli.bench.http_connection import READ_LIMIT_BYTES, HttpConnection
from octavo.frontend.client import AsyncClient
from octavo.frontend.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from octavo.protocol.errors import OctavoError
from octavo.protocol.params import OutputKind, SamplingParams
from octavo.protocol.pooling_params import PoolingParams
from octavo.protocol.structured import StructuredOutputsParams

_PATHS = {Kind.COMPLETIONS: "/v1/completions", Kind.CHAT: "/v1/chat/completions", Kind.POOLING: "/pooling"}
_OK = 200
_DATA = b"data: "


class CallRejected(Exception):
    """The engine or its server responded with an error."""


class Caller(Protocol):
    """Sends requests of one kind."""

    async def ask(self, job: ChaosJob) -> tuple[ChaosOutcome, Answer]:
        """Send the request and read the answer as the job says. Return the outcome, and the answer so far.

        Raises:
            OSError, EOFError: the connection broke.
            CallRejected: the response is an error.
            MalformedAnswer: the answer cannot be parsed.
        """

    async def close(self) -> None:
        """Disconnect from the engine."""


async def run_job(caller: Caller, job: ChaosJob, timeout_s: float) -> Result:
    """Run a job and return its result; never raises for a failed request.

    Args:
        caller: a caller of the job's kind.
        job: the request and the client's behavior.
        timeout_s: seconds after which the job fails.
    """
    answer: Answer | None = None
    detail = ""
    try:
        async with asyncio.timeout(timeout_s):
            outcome, answer = await caller.ask(job)
    except TimeoutError:
        outcome, detail = ChaosOutcome.FAILED, f"no answer within {timeout_s:g} s"
    except (OSError, EOFError) as error:
        outcome, detail = ChaosOutcome.BROKEN, f"{type(error).__name__}: {error}"
    except (CallRejected, MalformedAnswer, ValueError, KeyError, asyncio.LimitOverrunError) as error:
        outcome, detail = ChaosOutcome.FAILED, f"{type(error).__name__}: {error}"
    return Result(job.number, outcome, answer, detail, time.monotonic())


class HttpCaller:
    """Sends HTTP requests, each on a new connection.

    Args:
        location: the location of the server.
    """

    def __init__(self, location: EngineLocation) -> None:
        parts = urlsplit(location.url)
        self._host, self._port = parts.hostname or "", parts.port or 80

    async def ask(self, job: ChaosJob) -> tuple[ChaosOutcome, Answer]:
        """See `Caller`."""
        body = dict(job.request.body)
        if job.behavior.is_streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        connection = HttpConnection(*await asyncio.open_connection(self._host, self._port, limit=READ_LIMIT_BYTES))
        try:
            status = await connection.ask(self._frame(_PATHS[job.request.kind], json.dumps(body).encode()))
            if status != _OK:
                raise CallRejected(f"HTTP {status}: {(await _whole(connection))[:500].decode(errors='replace')}")
            if job.behavior.is_streamed:
                return await _read_stream(connection, job)
            return ChaosOutcome.ANSWERED, whole_answer(json.loads(await _whole(connection)))
        finally:
            connection.close()

    async def close(self) -> None:
        """Do nothing: no connection outlives its request."""

    def _frame(self, path: str, body: bytes) -> bytes:
        head = f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        return f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def _whole(connection: HttpConnection) -> bytes:
    return b"".join([piece async for piece in connection.body()])


async def _read_stream(connection: HttpConnection, job: ChaosJob) -> tuple[ChaosOutcome, Answer]:
    """Read a stream to its end, or until the job's client disconnects."""
    assembled = StreamedAnswer()
    num_pieces = 0
    has_end = False
    async with contextlib.aclosing(_events(connection)) as events:
        async for event in events:
            if event == b"[DONE]":
                assembled.end()
                has_end = True
                continue
            chunk = json.loads(event)
            if "error" in chunk:
                raise CallRejected(f"the stream contains an error event: {chunk['error']}")
            assembled.take(chunk)
            num_pieces += 1
            if num_pieces == job.behavior.leaves_after:
                return ChaosOutcome.LEFT, assembled.answer
            if job.behavior.pause_s:
                await asyncio.sleep(job.behavior.pause_s)
    if not has_end:
        raise EOFError("the connection closed before the stream ended")
    return ChaosOutcome.ANSWERED, assembled.answer


async def _events(connection: HttpConnection) -> AsyncGenerator[bytes]:
    rest = b""
    async for piece in connection.body():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                yield line.removeprefix(_DATA)


class JoinedCaller:
    """Sends requests through an `AsyncClient` that has joined the engine.

    Args:
        client: the client of the engine.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def ask(self, job: ChaosJob) -> tuple[ChaosOutcome, Answer]:
        """See `Caller`."""
        if job.request.kind is Kind.POOL:
            return ChaosOutcome.ANSWERED, await self._pool(job.request.body)
        body, behavior = job.request.body, job.behavior
        kind = OutputKind.DELTA if behavior.is_streamed else OutputKind.FINAL_ONLY
        assembled = _JoinedAnswer()
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
                    assembled.take(output)
                    num_pieces += 1
                    if num_pieces == behavior.leaves_after:
                        return ChaosOutcome.LEFT, assembled.answer
                    if num_pieces == behavior.aborts_after:
                        outputs_left = not output.finished
                        await self._client.abort(name)
                        if outputs_left:
                            return ChaosOutcome.ABORTED, await assembled.rest(outputs)
                    if behavior.pause_s:
                        await asyncio.sleep(behavior.pause_s)
        except OctavoError as error:
            raise CallRejected(f"{type(error).__name__}: {error}") from None
        assembled.end()
        return ChaosOutcome.ANSWERED, assembled.answer

    async def _pool(self, body: dict[str, Any]) -> Answer:
        fields = {name: body[name] for name in ("task", "truncate_prompt_tokens", "use_activation") if name in body}
        options = {name: body.get(name) for name in ("priority", "cache_salt")}
        try:
            results = await self._client.pool(body["input"], PoolingParams(**fields), **options)
        except OctavoError as error:
            raise CallRejected(f"{type(error).__name__}: {error}") from None
        return pooled_answer([one.array().tolist() for one in results], sum(len(one.token_ids) for one in results))

    async def close(self) -> None:
        """See `Caller`."""
        await self._client.close()


def _params(values: dict[str, Any], kind: OutputKind) -> SamplingParams:
    values = dict(values)
    if form := values.pop("structured_outputs", None):
        values["structured_outputs"] = StructuredOutputsParams(**form)
    if biases := values.pop("logit_bias", None):
        values["logit_bias"] = {int(token_id): bias for token_id, bias in biases.items()}
    return SamplingParams(**values, output_kind=kind)


class _JoinedAnswer:
    """Assembles `RequestOutput`s."""

    def __init__(self) -> None:
        self._choices: dict[int, dict[str, Any]] = {}
        self._prompt_logprobs: list[Any] | None = None
        self._num_prompt_tokens = 0
        self._is_over = False

    @property
    def answer(self) -> Answer:
        """The answer assembled so far."""
        num_tokens = sum(len(choice["token_ids"]) for choice in self._choices.values())
        return {
            "choices": [self._choices[index] for index in sorted(self._choices)],
            "prompt_logprobs": self._prompt_logprobs,
            "usage": {"prompt_tokens": self._num_prompt_tokens, "completion_tokens": num_tokens},
        }

    def take(self, output: RequestOutput) -> None:
        """Add an output.

        Raises:
            MalformedAnswer: the request, or one of its sequences, has already ended.
        """
        if self._is_over:
            raise MalformedAnswer("the request continues after its end")
        self._is_over = output.finished
        self._num_prompt_tokens = len(output.prompt_token_ids)
        if output.prompt_logprobs is not None:
            if self._prompt_logprobs is not None:
                raise MalformedAnswer("prompt logprobs appear twice")
            self._prompt_logprobs = [_logprobs(position) for position in output.prompt_logprobs]
        for sequence in output.outputs:
            self._take_sequence(sequence)

    def _take_sequence(self, sequence: CompletionOutput) -> None:
        index = sequence.index
        choice = self._choices.setdefault(
            index, {"index": index, "text": "", "token_ids": [], "logprobs": [], "finish_reason": None}
        )
        if choice["finish_reason"] is not None:
            raise MalformedAnswer(f"sequence {index} continues after its end")
        choice["text"] += sequence.text
        choice["token_ids"] += sequence.token_ids
        choice["logprobs"] += [_logprobs(position) for position in sequence.logprobs or ()]
        choice["cumulative_logprob"] = sequence.cumulative_logprob
        choice["finish_reason"] = sequence.finish_reason
        choice["stop_reason"] = sequence.stop_reason

    async def rest(self, outputs: AsyncIterator[RequestOutput]) -> Answer:
        """Read the remaining outputs of an aborted request.

        Raises:
            MalformedAnswer: the outputs do not end.
        """
        async for output in outputs:
            self.take(output)
        self.end()
        return self.answer

    def end(self) -> None:
        """Handle the end of the outputs.

        Raises:
            MalformedAnswer: the request has not finished.
        """
        if not self._is_over or any(choice["finish_reason"] is None for choice in self._choices.values()):
            raise MalformedAnswer("the outputs ended before the request finished")


def _logprobs(position: PositionLogprobs | None) -> list[Any] | None:
    if position is None:
        return None
    return [[token_id, entry.logprob, entry.rank, entry.decoded_token] for token_id, entry in position.items()]
