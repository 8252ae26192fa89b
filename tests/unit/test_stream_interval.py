"""Several tokens per message: the same tokens and times in fewer messages."""

import asyncio
from contextlib import aclosing

import pytest
from core_fakes import CLIENT, FakeEngine
from fake_client import byte_tokenizer, resolved_config
from generations import generation_on, outputs_of

from octavo.frontend.generation.interval import FINAL_INTERVAL, stream_interval
from octavo.frontend.generation.sequence import Sequence
from octavo.frontend.generation.spec import make_spec
from octavo.frontend.request_stream import RequestStream
from octavo.protocol.events import Finished, FinishReason, Tokens
from octavo.protocol.params import OutputKind, SamplingParams, SamplingSpec
from octavo.protocol.requests import Submit

PROMPT = [1, 2, 3]


def events_of(interval: int, num_tokens: int, *, abort_after: int | None = None) -> list[Tokens | Finished]:
    """Return what the frontend of one request hears."""
    engine = FakeEngine(async_scheduling=False)
    scheduler = engine.scheduler
    sampling = SamplingSpec(max_tokens=num_tokens, seed=0, logprobs=0)
    scheduler.submit(CLIENT, Submit("r", PROMPT, sampling, stream_interval=interval))
    heard = []
    for number in range(num_tokens):
        if number == abort_after:
            heard += scheduler.abort(CLIENT, ["r"])
            break
        plan = scheduler.plan()
        assert plan is not None
        heard += scheduler.commit(engine.worker.execute(plan))
    assert not scheduler.has_requests
    return [event for _, event in heard]


@pytest.mark.parametrize(
    ("interval", "sizes"), [(1, [1] * 10), (4, [1, 4, 4, 1]), (3, [1, 3, 3, 3]), (64, [1, 9])], ids=str
)
def test_the_first_token_comes_at_once_and_the_others_together(interval: int, sizes: list[int]) -> None:
    *tokens, finished = events_of(interval, 10)
    assert [len(event.token_ids) for event in tokens] == sizes
    assert [len(event.logprobs) for event in tokens] == sizes
    assert isinstance(finished, Finished) and finished.reason is FinishReason.LENGTH


def test_tokens_and_logprobs_do_not_depend_on_the_stream_interval() -> None:
    at_once, together = events_of(1, 20)[:-1], events_of(7, 20)[:-1]
    assert [token for event in together for token in event.token_ids] == [
        token for event in at_once for token in event.token_ids
    ]
    assert [entry for event in together for entry in event.logprobs] == [
        entry for event in at_once for entry in event.logprobs
    ]


def test_each_token_that_waited_has_its_time() -> None:
    *tokens, finished = events_of(8, 20)
    times = [time for event in tokens for time in event.times]
    assert len(times) == 20 and times == sorted(set(times))
    assert times[0] == finished.timings.first_token
    assert times[-1] < finished.timings.finished
    assert all(event.times == [] for event in events_of(1, 20)[:-1])


def test_an_abort_delivers_what_was_kept_back() -> None:
    *tokens, finished = events_of(8, 20, abort_after=5)
    assert [len(event.token_ids) for event in tokens] == [1, 4]
    assert finished.reason is FinishReason.ABORT


def test_plans_are_the_same() -> None:
    plans = []
    for interval in (1, 5):
        engine = FakeEngine(num_blocks=24)
        for number in range(6):
            engine.submit(str(number), [number + 1] * 9, max_tokens=20, seed=number, stream_interval=interval)
        engine.run()
        plans.append(engine.plans)
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("kind", "stop", "configured", "expected"),
    [
        (OutputKind.DELTA, None, 1, 1),
        (OutputKind.DELTA, None, 10, 10),
        (OutputKind.CUMULATIVE, None, 10, 10),
        (OutputKind.FINAL_ONLY, None, 1, FINAL_INTERVAL),
        (OutputKind.FINAL_ONLY, None, 1000, 1000),
        (OutputKind.FINAL_ONLY, ["."], 10, 1),
        (OutputKind.DELTA, ["."], 10, 1),
    ],
)
def test_the_stream_interval_by_output_kind(
    kind: OutputKind, stop: list[str] | None, configured: int, expected: int
) -> None:
    config = resolved_config(stream_interval=configured)
    assert stream_interval(SamplingParams(stop=stop), kind, config) == expected


class Link:
    """Hands the request its events at once."""

    def __init__(self, events: list[Tokens | Finished]) -> None:
        self._events = events

    def submit(self, submit: Submit, arrived: asyncio.Event, sibling: str | None = None) -> RequestStream:
        stream = RequestStream(submit.request_id, arrived)
        for event in self._events:
            stream.put(event)
        return stream

    def abort(self, request_ids: list[str]) -> None:
        pass


class Intervals:
    """An observer that remembers times between tokens."""

    def __init__(self) -> None:
        self.num_first = 0
        self.intervals_s: list[float] = []

    def on_live_requests(self, count: int) -> None:
        pass

    def on_first_token(self, latency_s: float, engine: int = 0) -> None:
        self.num_first += 1

    def on_inter_token(self, latency_s: float, num_tokens: int, engine: int = 0) -> None:
        self.intervals_s += [latency_s / num_tokens] * num_tokens

    def on_finished(self, record: object, engine: int = 0) -> None:
        pass


def test_the_observer_hears_the_times_that_the_engine_took() -> None:
    events = [
        Tokens("a", [97], times=[10.0]),
        Tokens("a", [98, 99, 100], times=[10.5, 10.75, 11.75]),
        Tokens("a", [101], times=[12.0]),
        Finished("a", FinishReason.LENGTH),
    ]
    params, observer = SamplingParams(max_tokens=8), Intervals()
    spec = make_spec(
        params, num_prompt_tokens=3, max_model_len=64, seed=0, config=resolved_config(), tokenizer=byte_tokenizer()
    )
    child = (Submit("a", PROMPT, spec), Sequence(0, byte_tokenizer(), PROMPT, params, spec))

    async def consume() -> None:
        work = generation_on(Link(events), params, [child], OutputKind.FINAL_ONLY, observer=observer)
        async with aclosing(outputs_of(work)) as outputs:
            assert [output.outputs[0].text async for output in outputs] == ["abcde"]

    asyncio.run(consume())
    assert observer.num_first == 1
    assert observer.intervals_s == [0.5, 0.25, 1.0, 0.25]
