"""An observer gets exactly one record of a request, however it ends."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import pytest
from fake_client import byte_tokenizer, resolved_config
from generations import generation_on, outputs_of

from octavo.frontend.generation.fanout import Generation
from octavo.frontend.generation.sequence import Sequence
from octavo.frontend.generation.spec import make_spec
from octavo.frontend.metrics.record import RequestRecord
from octavo.frontend.request_stream import RequestStream
from octavo.protocol.buffers import Buffer
from octavo.protocol.errors import OverloadedError, RequestFailedError
from octavo.protocol.events import Failed, FailureKind, Finished, FinishReason, PooledOutput, Tokens
from octavo.protocol.params import OutputKind, SamplingParams
from octavo.protocol.requests import Submit

PROMPT = [1, 2, 3]


class Link:
    """Hands every submitted request its events at once."""

    def __init__(self, fill: Callable[[RequestStream], None]) -> None:
        self._fill = fill

    def submit(self, submit: Submit, arrived: asyncio.Event, sibling: str | None = None) -> RequestStream:
        stream = RequestStream(submit.request_id, arrived)
        self._fill(stream)
        return stream

    def abort(self, request_ids: list[str]) -> None:
        pass


class Notes:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.num_tokens: list[int] = []
        self.limits: list[str] = []

    def on_live_requests(self, count: int) -> None:
        pass

    def on_first_token(self, latency_s: float, engine: int = 0) -> None:
        self.num_tokens.append(1)

    def on_inter_token(self, latency_s: float, num_tokens: int, engine: int = 0) -> None:
        self.num_tokens.append(num_tokens)

    def on_rejected(self, limit: str, engine: int = 0) -> None:
        self.limits.append(limit)

    def on_finished(self, record: RequestRecord, engine: int = 0) -> None:
        self.records.append(record)


def generation(fill: Callable[[RequestStream], None]) -> tuple[Generation, Notes]:
    params, notes, config = SamplingParams(max_tokens=8), Notes(), resolved_config()
    spec = make_spec(params, num_prompt_tokens=3, max_model_len=64, seed=0, config=config, tokenizer=byte_tokenizer())
    child = (Submit("a", PROMPT, spec), Sequence(0, byte_tokenizer(), PROMPT, params, spec))
    link = Link(fill)
    return generation_on(link, params, [child], OutputKind.DELTA, observer=notes), notes


def finish(stream: RequestStream) -> None:
    stream.put(Tokens("a", [97, 98], num_cached_tokens=2))
    stream.put(Finished("a", FinishReason.LENGTH, num_cached_tokens=2, num_preemptions=1))


def hang(stream: RequestStream) -> None:
    stream.put(Tokens("a", [97]))


def fail(stream: RequestStream) -> None:
    stream.fail(RequestFailedError("a step failed"))


async def consume(work: Generation, *, leave: bool = False) -> None:
    async with aclosing(outputs_of(work)) as outputs:
        async for _ in outputs:
            if leave:
                return


def test_finished_request() -> None:
    work, notes = generation(finish)
    asyncio.run(consume(work))
    (record,) = notes.records
    assert (record.finish_reason, record.num_prompt_tokens, record.num_generation_tokens) == ("length", 3, 2)
    assert (record.num_cached_tokens, record.num_preemptions, record.params_max_tokens) == (2, 1, 8)
    assert record.e2e_s >= 0


def test_a_request_that_is_left_because_another_failed_is_aborted() -> None:
    work, notes = generation(hang)
    with pytest.raises(RequestFailedError), work:
        raise RequestFailedError("another one")
    assert [record.finish_reason for record in notes.records] == ["abort"]


def test_request_that_has_finished_without_a_token() -> None:
    pooled = PooledOutput(Buffer(b"1234"), (1,), "float32")
    work, notes = generation(lambda stream: stream.put(Finished("a", FinishReason.STOP, result=pooled)))
    asyncio.run(consume(work))
    (record,) = notes.records
    assert (record.finish_reason, record.num_generation_tokens) == ("stop", 0)
    assert notes.num_tokens == []


def test_request_whose_caller_left() -> None:
    work, notes = generation(hang)
    asyncio.run(consume(work, leave=True))
    assert [(record.finish_reason, record.num_generation_tokens) for record in notes.records] == [("abort", 1)]


def test_failed_request() -> None:
    work, notes = generation(fail)
    with pytest.raises(RequestFailedError):
        asyncio.run(consume(work))
    assert [record.finish_reason for record in notes.records] == ["error"]
    assert notes.limits == []


def test_request_that_a_full_queue_rejected() -> None:
    work, notes = generation(
        lambda stream: stream.put(Failed("a", FailureKind.OVERLOADED, "too many", "max_num_queued_reqs"))
    )
    with pytest.raises(OverloadedError, match="too many"):
        asyncio.run(consume(work))
    assert notes.limits == ["max_num_queued_reqs"]
    assert [record.finish_reason for record in notes.records] == ["error"]
