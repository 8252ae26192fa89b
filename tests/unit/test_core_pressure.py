"""A scheduler with too little memory: the cost of preemption, starvation by priority, and the cost of a step."""

import random
from collections import Counter

import pytest
from client_events import by_request
from core_fakes import FakeEngine, alone

from octavo.core_proc.cache.pool import BlockPool
from octavo.core_proc.cache.prefix import PrefixCache
from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.acceptance import Acceptance
from octavo.core_proc.scheduler.policy import AGING_REQUESTS, OrderedRequests, order_of
from octavo.core_proc.scheduler.stop import FinishCause, find_stop
from octavo.protocol.events import FinishReason, StreamedTokens, Tokens
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit
from octavo.protocol.steps import StepResult


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_blocks", [40, 80])
def test_preemption_recomputes_no_more_than_is_generated(num_blocks, enable_prefix_caching):
    """30 requests that need 17 blocks each: far more than there are."""
    random_source = random.Random(1)
    engine = FakeEngine(
        num_blocks=num_blocks,
        max_num_seqs=32,
        max_num_batched_tokens=64,
        max_model_len=140,
        enable_prefix_caching=enable_prefix_caching,
    )
    for index in range(30):
        engine.submit(str(index), [random_source.randrange(1, 50) for _ in range(8)], max_tokens=60)
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 30, "there is no pressure"
    assert stats.generation_tokens == 30 * 60
    share = 0.7 if enable_prefix_caching else 0.95
    assert 0 < stats.num_recomputed_tokens < share * stats.generation_tokens
    assert stats.num_preemptions < 4 * 30


def test_recomputed_tokens_are_those_that_the_cache_has_lost():
    engine = FakeEngine(enable_prefix_caching=False, async_scheduling=False)
    engine.submit("r", [1] * 10, max_tokens=6)
    for _ in range(6):
        engine.turn()
    assert engine.scheduler.stats().num_recomputed_tokens == 0
    engine.scheduler.restrict(frozenset())
    engine.scheduler.restrict(None)
    engine.run()
    assert engine.scheduler.stats().num_recomputed_tokens == 12
    assert engine.outputs["r"].token_ids == alone([1] * 10, 6).token_ids


def test_a_low_priority_is_passed_by_a_bounded_number_of_requests():
    low = order_of("priority", 3, arrival=0)
    assert order_of("priority", 1, arrival=2 * AGING_REQUESTS - 1) < low
    assert order_of("priority", 1, arrival=2 * AGING_REQUESTS + 1) > low
    assert order_of("priority", -(10**12), arrival=10**6) < low, "values far apart still decide"


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, *names: str) -> Counter[str]:
    calls: Counter[str] = Counter()
    for name in names:
        original = getattr(owner, name)

        def counted(*args, _name=name, _original=original, **kwargs):
            calls[_name] += 1
            return _original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)
    return calls


def decoding_engine(num_running: int, num_waiting: int) -> FakeEngine:
    """An engine whose slots all decode, with a queue behind them."""
    engine = FakeEngine(
        num_blocks=40 * num_running,
        block_size=16,
        max_num_seqs=num_running,
        max_num_batched_tokens=20 * num_running,
        max_model_len=600,
    )
    for index in range(num_running):
        engine.submit(str(index), [index % 49 + 1] * (3 + index % 16), max_tokens=500)
    for _ in range(4):
        engine.turn()
    for index in range(num_waiting):
        engine.scheduler.submit(b"client", waiting_submit(index))
    return engine


def waiting_submit(index: int) -> Submit:
    return Submit(f"waiting {index}", pack_ids([index % 49 + 1] * 40), SamplingSpec(max_tokens=5, seed=0))


def test_a_step_of_decodes_looks_closely_only_at_those_that_cross_a_block(monkeypatch):
    num_running, num_steps = 64, 32
    engine = decoding_engine(num_running, 0)
    scheduler = engine.scheduler
    cache = count_calls(monkeypatch, PrefixCache, "extend", "cache_full_blocks", "num_missing_blocks", "count_hits")
    accepted = count_calls(monkeypatch, Acceptance, "_accept")
    num_events = num_tokens = 0
    for _ in range(num_steps):
        plan = scheduler.plan()
        assert plan is not None and len(plan.scheduled) == num_running
        events = scheduler.commit(engine._results.popleft())
        num_events += len(events)
        num_tokens += len(by_request(events))
        engine._results.append(engine.worker.execute(plan))
    assert num_tokens == num_running * num_steps
    assert num_events < 0.1 * num_tokens, "the others share one event per step"
    per_request_and_step = {name: count / (num_running * num_steps) for name, count in (cache + accepted).items()}
    assert per_request_and_step["extend"] < 0.2, "a request crosses a block's edge in one of sixteen steps"
    assert per_request_and_step["cache_full_blocks"] < 0.2
    assert per_request_and_step["_accept"] < 0.1
    assert "count_hits" not in per_request_and_step


def test_the_streams_of_a_frontend_share_an_event():
    engine = FakeEngine(block_size=16, async_scheduling=False)
    for client, name in ((b"one", "a"), (b"two", "b"), (b"one", "c")):
        engine.scheduler.submit(client, Submit(name, pack_ids([5, 6]), SamplingSpec(max_tokens=9, seed=0)))
    steps = []
    for _ in range(2):
        engine.scheduler.plan()
        result = StepResult(engine.scheduler.in_flight[0].sequence, pack_ids([7, 8, 9]), [], [])
        steps.append(engine.scheduler.commit(result))
    assert [type(event) for _, event in steps[0]] == [Tokens] * 3, "the first tokens come one by one"
    assert steps[1] == [
        (b"one", StreamedTokens(["a", "c"], [7, 9], [0, 0])),
        (b"two", StreamedTokens(["b"], [8], [0])),
    ]


@pytest.mark.parametrize("num_waiting", [3000])
def test_a_step_does_not_look_at_the_queue(num_waiting, monkeypatch):
    engine = decoding_engine(8, num_waiting)
    touched = count_calls(monkeypatch, OrderedRequests, "__iter__", "add", "remove", "_find")
    lookups = count_calls(monkeypatch, BlockPool, "find")
    looked_at = Counter[str]()
    original = Request.num_uncomputed_tokens.fget
    assert original is not None

    def counted(request: Request) -> int:
        looked_at[request.request_id] += 1
        return original(request)

    monkeypatch.setattr(Request, "num_uncomputed_tokens", property(counted))
    for _ in range(10):
        plan = engine.scheduler.plan()
        assert plan is not None
        engine.scheduler.commit(engine._results.popleft())
        engine._results.append(engine.worker.execute(plan))
    assert touched["add"] == touched["remove"] == 0
    assert sum(lookups.values()) <= 1
    assert not [name for name in looked_at if name.startswith("waiting") and name != "waiting 0"]


class ScannedTuple(tuple):
    """Counts how often it is searched."""

    num_scans = 0

    def __contains__(self, value: object) -> bool:
        ScannedTuple.num_scans += 1
        return super().__contains__(value)


def test_stop_tokens_are_not_scanned_for_each_token():
    stop_token_ids = ScannedTuple(range(100, 50_100))
    sampling = SamplingSpec(max_tokens=60, seed=0, stop_token_ids=stop_token_ids, logprobs=0)
    request = Request(b"", Submit("r", pack_ids([1] * 4), sampling), 0, 0.0)
    for token_id in range(1, 60):
        request.token_ids.append(token_id % 50)
        assert find_stop(request) is None
    assert ScannedTuple.num_scans == 0
    request.token_ids.append(100)
    assert find_stop(request) == FinishCause(FinishReason.STOP, 100)
