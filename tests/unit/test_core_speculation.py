"""Drafts: what is proposed, how steps verify it, and that outputs are those without."""

import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from core_fakes import FakeEngine

from octavo.core_proc.request import Request, RequestState
from octavo.core_proc.speculation.depth import (
    FIRST_NOT_AHEAD_PRICE,
    MAX_RESTS,
    PROBE_STEPS,
    Depth,
    DraftCost,
    FixedDepth,
    NotAheadCost,
    StepCost,
)
from octavo.core_proc.speculation.ngram import NgramProposer
from octavo.core_proc.speculation.payoff import FIRST_REST_STEPS, MIN_REQUESTS, WINDOW_STEPS, WINDOWS, Payoff
from octavo.core_proc.speculation.speculation import Speculation
from octavo.core_proc.speculation.suffix import SuffixProposer
from octavo.protocol.config import CacheGroupSpec
from octavo.protocol.config.speculation import ResolvedSpeculation
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit
from octavo.protocol.stats import EngineStats

NGRAM = ResolvedSpeculation(method="ngram", max_depth=4, prompt_lookup_min=2, prompt_lookup_max=4)
SUFFIX = ResolvedSpeculation(method="suffix", max_depth=6)
HEAD = ResolvedSpeculation(method="eagle", max_depth=3)
"""The simulated workers read the ids of its drafts late, because its depth is odd."""
ECHO = 2
"""A seed with which the simulated model repeats itself."""


def outputs(engine: FakeEngine) -> dict[str, list[int]]:
    return {name: output.token_ids for name, output in engine.outputs.items()}


def run_random(engine: FakeEngine, seed: int, num_requests: int = 30, aborts: bool = True) -> dict[str, list[int]]:
    rng, events = random.Random(seed), random.Random(seed)
    for index in range(num_requests):
        prompt = [rng.randrange(1, 50) for _ in range(rng.randint(1, 30))]
        fields = {"logprobs": 1} if rng.random() < 0.3 else {}
        if rng.random() < 0.3:
            fields["stop_token_ids"] = (rng.randrange(1, 50), 4)
        engine.submit(f"r{index}", prompt, rng.randint(1, 30), seed=rng.choice([ECHO, index]), **fields)
        for _ in range(events.randint(0, 6)):
            if engine.scheduler.has_requests:
                engine.turn()
        if aborts and events.random() < 0.1:
            engine.abort(f"r{events.randrange(index + 1)}")
        if aborts and events.random() < 0.03:
            engine.replace_worker()
    engine.run()
    return {name: output.token_ids for name, output in engine.outputs.items() if output.end.reason.name != "ABORT"}


@pytest.mark.parametrize("speculation", [NGRAM, SUFFIX, HEAD, msgspec.structs.replace(HEAD, max_depth=4)])
@pytest.mark.parametrize(("num_blocks", "num_stages", "is_async"), [(64, 1, True), (24, 1, False), (64, 2, True)])
def test_outputs_are_those_without_drafts(speculation, num_blocks, num_stages, is_async) -> None:
    settings = {"pipeline_parallel_size": num_stages, "world_size": num_stages, "async_scheduling": is_async}
    engine = FakeEngine(num_blocks, speculation=speculation, **settings)
    plain = FakeEngine(64, **settings)
    for seed in range(3):
        found, wanted = run_random(engine, seed), run_random(plain, seed, aborts=False)
        assert len(found) > 20
        assert found == {name: wanted[name] for name in found}
    counters = engine.scheduler.counters
    assert counters.spec_decode_num_drafts > 20
    assert 0 < counters.spec_decode_num_accepted_tokens < counters.spec_decode_num_draft_tokens
    assert sum(counters.spec_decode_accepted_per_pos.values()) == counters.spec_decode_num_accepted_tokens
    assert counters.num_preemptions > 0 or num_blocks > 24


STATE = CacheGroupSpec(kind="state", window=16, num_layers=1, block_bytes=1000)
FULL, WINDOW = (
    CacheGroupSpec(kind=kind, window=window, num_layers=1, block_bytes=1000)
    for kind, window in (("full", 0), ("window", 5))
)


@pytest.mark.parametrize(
    ("groups", "speculation", "settings"),
    [
        ([STATE], NGRAM, {"num_blocks": 17}),
        ([STATE], SUFFIX, {"enable_prefix_caching": False}),
        ([FULL, STATE], SUFFIX, {"num_blocks": 24}),
        ([FULL, WINDOW, STATE], NGRAM, {"num_blocks": 40, "max_num_batched_tokens": 7}),
        ([FULL, WINDOW, STATE], msgspec.structs.replace(SUFFIX, max_depth=20), {}),
        ([FULL, STATE], HEAD, {"pipeline_parallel_size": 2, "world_size": 2}),
    ],
)
def test_recurrent_states_go_back_to_before_wrong_drafts(groups, speculation, settings) -> None:
    settings = {"num_blocks": 64} | settings
    engine, plain = FakeEngine(groups=groups, speculation=speculation, **settings), FakeEngine(64)
    for seed in range(3):
        found, wanted = run_random(engine, seed), run_random(plain, seed, aborts=False)
        assert len(found) > 20
        assert found == {name: wanted[name] for name in found}
    counters = engine.scheduler.counters
    assert 0 < counters.spec_decode_num_accepted_tokens < counters.spec_decode_num_draft_tokens
    assert any(plan.state_moves and not plan.draft_tokens for plan in engine.plans), "nothing was computed again"
    again = [part for plan in engine.plans for part in plan.scheduled if 1 < part.num_samples < part.num_tokens]
    assert again, "no step that computes again has drafts"
    states = engine.scheduler.cache.states
    assert states.pool.num_free == states.pool.num_blocks
    assert bool(states.pool.cached_blocks()) == engine.config.enable_prefix_caching


def test_drafts_end_before_a_checkpoint() -> None:
    engine = FakeEngine(groups=[STATE], speculation=NGRAM)
    engine.submit("r", [1, 2, 3, 1, 2, 3], max_tokens=50, seed=ECHO)
    engine.run()
    ends = {(part.start + part.num_tokens, part.num_samples) for plan in engine.plans for part in plan.scheduled}
    assert {(16, 1), (32, 1), (48, 1)} <= ends
    assert len(engine.scheduler.cache.states.pool.cached_blocks()) == 3
    assert any(num_samples > 1 for _, num_samples in ends)


def test_a_repetition_is_computed_several_tokens_at_a_time() -> None:
    engine, plain = FakeEngine(speculation=NGRAM), FakeEngine()
    for one in (engine, plain):
        one.submit("r", [1, 2, 3, 4, 5, 1, 2, 3], max_tokens=40, seed=ECHO)
        one.run()
    assert outputs(engine) == outputs(plain)
    assert len(engine.plans) < 0.7 * len(plain.plans)
    assert all(part.num_tokens <= 1 + NGRAM.max_depth for plan in engine.plans[1:] for part in plan.scheduled)


@pytest.mark.parametrize(("wanted", "most"), [(0, 1), (2, 3), (9, 5)])
def test_a_request_may_choose_a_smaller_depth(wanted: int, most: int) -> None:
    engine = FakeEngine(speculation=NGRAM)
    engine.submit("r", [1, 2, 3, 4, 5, 1, 2, 3], max_tokens=40, seed=ECHO, speculation=wanted)
    engine.run()
    assert max(part.num_tokens for plan in engine.plans[1:] for part in plan.scheduled) == most


def test_workers_draft_as_many_tokens_as_are_worth_it() -> None:
    engine = FakeEngine(speculation=HEAD)
    engine.submit("r", [1, 2, 3], max_tokens=40)
    engine.run()
    assert engine.plans[0].num_drafts == HEAD.max_depth
    assert len(engine.plans) < 20
    silent = FakeEngine(speculation=HEAD)
    silent.submit("r", [1, 2, 3], max_tokens=40, speculation=0)
    silent.run()
    assert not any(plan.draft_tokens for plan in silent.plans)
    assert not any(plan.num_drafts for plan in silent.plans[2:]), "a request that does not speculate needs no drafts"
    assert outputs(silent) == outputs(engine)
    assert not silent.scheduler._speculation._drafts._drafts
    assert not engine.scheduler._speculation._drafts._drafts


def test_the_same_calls_make_the_same_drafts() -> None:
    # A fresh scheduler that gets the same calls makes the same plans: no order of a set, no clock.
    plans = []
    for _ in range(2):
        engine = FakeEngine(speculation=SUFFIX)
        run_random(engine, 5)
        plans.append(engine.plans)
    assert plans[0] == plans[1]
    assert any(plan.draft_tokens for plan in plans[0])


def test_ngram_takes_the_latest_longest_match_and_repeats_it() -> None:
    proposer, request = NgramProposer(2, 4), one_request([1, 2, 3, 9, 1, 2, 3, 7, 5, 3, 8, 1, 2, 3])
    assert list(proposer.propose(request, 3)) == [7, 5, 3]
    request.token_ids.extend([7, 7, 7])
    assert list(proposer.propose(request, 3)) == [7, 7, 7]
    request.token_ids.append(40)
    assert proposer.propose(request, 3) is None


def test_suffix_follows_the_most_frequent_path_of_its_own_tenant() -> None:
    proposer = SuffixProposer(SUFFIX)
    for output in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 8, 9], [1, 2, 3, 4, 8, 7]):
        ended = one_request([30], output)
        proposer.propose(ended, 1)
        proposer.forget(ended)
    assert list(proposer.propose(one_request([1, 2, 3]), 6)) == [4, 8, 7]
    assert proposer.propose(one_request([1, 2, 3], cache_salt="other"), 6) is None


def test_a_long_prompt_is_indexed_over_several_calls() -> None:
    proposer, request = NgramProposer(2, 4), one_request([*range(9000), 1, 2])
    found = [proposer.propose(request, 1) for _ in range(3)]
    assert found[:2] == [None, None]
    assert list(found[2]) == [3]


def test_recent_outputs_take_bounded_memory() -> None:
    proposer = SuffixProposer(ResolvedSpeculation(method="suffix", max_depth=6, suffix_max_cached_requests=4))
    for index in range(10):
        ended = one_request([30], [index, 2, 3, 4, 5])
        proposer.propose(ended, 1)
        proposer.forget(ended)
    assert proposer._young.num_outputs + proposer._old.num_outputs <= 4
    assert proposer.propose(one_request([1, 2, 3]), 6) is None, "the output of request 1 is forgotten"
    assert proposer.propose(one_request([9, 2, 3]), 6)


def test_the_price_of_a_row_is_learned_from_step_times() -> None:
    cost = StepCost()
    for index in range(200):
        num_rows = 1 + index % 8
        cost.observe(num_rows, 0.010 + 0.0005 * num_rows)
    assert cost.row_price(1) == pytest.approx(0.0005 / 0.0105, rel=0.2)
    assert cost.row_price(64) == pytest.approx(64 * 0.0005 / (0.010 + 64 * 0.0005), rel=0.2)


def test_depth_follows_acceptance_and_price() -> None:
    depth = Depth(8)
    depth.learn(20, was_wrong=False)
    assert depth.choose(0.1) == 8
    for _ in range(20):
        depth.learn(0, was_wrong=True)
    assert depth.choose(0.1) == 0
    assert Depth(8).choose(0.9) == 0


def test_a_fixed_depth_learns_nothing() -> None:
    depth = FixedDepth(8)
    for _ in range(20):
        depth.learn(0, was_wrong=True)
    assert (depth.choose(0.0), depth.gain(8, 0.0)) == (8, 8.0)


def test_the_price_of_a_step_that_is_not_planned_ahead_is_learned_from_idle_workers() -> None:
    cost = NotAheadCost()
    cost.observe(0.0001, is_ahead=True)
    assert cost.price(0.01) == FIRST_NOT_AHEAD_PRICE, "nothing is known of steps that are not planned ahead"
    for _ in range(100):
        cost.observe(0.0001, is_ahead=True)
        cost.observe(0.0006, is_ahead=False)
    assert cost.price(0.01) == pytest.approx(0.05)
    assert cost.price(0.1) == pytest.approx(0.005)
    assert (cost.price(0.0002), cost.price(0.0)) == (1.0, FIRST_NOT_AHEAD_PRICE)
    cost.observe(10.0, is_ahead=False)
    assert cost.price(0.01) < 0.06, "one disturbed step counts little"


def test_workers_that_are_never_idle_before_planned_steps_have_a_mean_too() -> None:
    cost = NotAheadCost()
    for step in range(1000):
        cost.observe(0.004 if step % 50 == 0 else 0.0, is_ahead=True)
        cost.observe(0.0006, is_ahead=False)
    assert cost.price(0.01) == pytest.approx(0.05, abs=0.01)
    cost.observe(-1.0, is_ahead=True)
    assert cost.price(0.01) == pytest.approx(0.05, abs=0.01), "the first step of a worker says nothing"
    always_busy = NotAheadCost()
    for _ in range(100):
        always_busy.observe(0.0, is_ahead=True)
        always_busy.observe(0.0006, is_ahead=False)
    assert always_busy.price(0.01) == pytest.approx(0.06)


def test_a_few_drafts_in_a_large_batch_are_not_worth_a_step_that_is_not_planned_ahead() -> None:
    for num_decoding, is_worth_it in ((1, True), (2, True), (4, False)):
        held: list[Request] = []
        batch: Any = SimpleNamespace(num_decoding=num_decoding, hold=held.append, has_states=False)
        batch.may_speculate_for = lambda request: request.is_decoding
        speculation = Speculation(ResolvedSpeculation(method="grammar", max_depth=4), batch, EngineStats())
        speculation._cost.row_price = lambda num_requests: 0.5
        request = one_request([1, 2])
        request.state, request.is_decoding, request.num_pending_tokens = RequestState.RUNNING, True, 1
        depth = speculation._depths[request] = Depth(4)
        depth.learn(2, was_wrong=False)
        speculation.choose([(request, pack_ids([5, 6, 7]))])
        assert bool(held) == is_worth_it, num_decoding
        assert depth.expected == 5


def test_grammars_rest_longer_each_time_in_large_batches_only() -> None:
    batch: Any = SimpleNamespace(num_decoding=20, hold=lambda request: None, has_states=False)
    batch.may_speculate_for = lambda request: True
    speculation = Speculation(ResolvedSpeculation(method="grammar", max_depth=4), batch, EngineStats())
    speculation._cost.row_price = lambda num_requests: 0.5
    request = one_request([1, 2])
    request.state, request.is_decoding, request.num_pending_tokens = RequestState.RUNNING, True, 1
    depth = speculation._depths[request] = Depth(4)
    depth.learn(2, was_wrong=False)

    def rests(num_decoding: int, draft: list[int]) -> int:
        batch.num_decoding = num_decoding
        speculation.choose([(request, pack_ids(draft))])
        return speculation._num_rests

    assert [rests(20, [5]) for _ in range(5)] == [2, 4, 8, MAX_RESTS, MAX_RESTS]
    assert rests(1, [5]) == 0, "a small batch never rests, whatever was before it"
    assert [rests(20, [5]) for _ in range(2)] == [2, 4]
    speculation._not_ahead_cost.price = lambda step_s: 0.0
    assert rests(20, [5, 6, 7]) == 0, "drafts that are worth it begin anew"
    assert rests(20, [5]) == 2


def test_the_price_of_a_draft_is_its_share_of_a_step() -> None:
    cost = DraftCost()
    cost.observe(0, 0.0, 0.010)
    assert cost.price == 0.0
    for _ in range(200):
        cost.observe(3, 0.006, 0.016)
    assert cost.price == pytest.approx(0.2)
    cost.observe(1, 5.0, 5.01)  # the draft model has read a long prompt
    assert cost.price < 0.25


def test_slow_and_wrong_drafts_are_asked_for_seldom() -> None:
    batch: Any = SimpleNamespace(num_decoding=1, has_states=False)
    speculation = Speculation(ResolvedSpeculation(method="draft_model", max_depth=4), batch, EngineStats())
    request = one_request([1, 2])
    assert speculation.num_drafts([]) == 0
    assert speculation.num_drafts([request]) == 4
    speculation._draft_cost.price = 0.4
    assert 0 < speculation.num_drafts([request]) < 4
    depth = speculation._depths[request] = Depth(4)
    for _ in range(9):
        depth.learn(0, was_wrong=True)
    assert [speculation.num_drafts([request]) for _ in range(2 * PROBE_STEPS)].count(1) == 2
    assert speculation.num_drafts([request]) == 0
    speculation._draft_cost.price = 0.9
    assert not any(speculation.num_drafts([request]) for _ in range(2 * PROBE_STEPS))


def one_request(prompt: list[int], output: list[int] = (), **fields) -> Request:
    submit = Submit("r", pack_ids(prompt), SamplingSpec(max_tokens=100, seed=0), **fields)
    request = Request(b"", submit, 0, 0.0)
    request.token_ids.extend(output)
    return request


def test_a_batch_that_is_slower_with_drafts_does_without_them() -> None:
    payoff = Payoff()

    def run(num_steps: int, num_requests: int, gain: float) -> int:
        """Return how many of so many steps may have drafts, which change the tokens per second by a factor."""
        num_speculating = 0
        for _ in range(num_steps):
            num_speculating += payoff.may_speculate
            period_s = 0.01 / gain if payoff.may_speculate else 0.01
            payoff.observe(num_requests, num_requests, period_s, has_draft_tokens=payoff.may_speculate)
        return num_speculating

    comparison = WINDOW_STEPS * len(WINDOWS) + 1
    run(comparison, 16, gain=0.9)
    assert not payoff.may_speculate
    num_speculating = run(10 * FIRST_REST_STEPS, 16, gain=0.9)
    assert num_speculating < 0.02 * 10 * FIRST_REST_STEPS, "comparisons become seldom"
    assert run(100, MIN_REQUESTS - 1, gain=0.9) >= 99, "small batches always draft"
    assert run(100, 8, gain=0.9) <= 1, "the verdict holds for what is left of a batch, and for the next batch"
    assert run(1, 33, gain=0.9) == 0 and payoff.may_speculate, "another batch is compared anew"
    run(comparison, 33, gain=1.01)
    assert not payoff.may_speculate, "a tie is none"
    run(1, 8, gain=1.2)
    run(comparison, 8, gain=1.2)
    assert payoff.may_speculate
    assert run(FIRST_REST_STEPS, 8, gain=1.2) >= FIRST_REST_STEPS - WINDOW_STEPS * len(WINDOWS)
    assert run(1, 11, gain=0.9) == 1 and run(2 * comparison, 11, gain=0.9) < comparison, "one that grows is compared"


def test_a_batch_without_drafts_is_not_compared_and_one_slow_step_decides_nothing() -> None:
    payoff = Payoff()
    for _ in range(1000):
        payoff.observe(64, 64, 0.01, has_draft_tokens=False)
        assert payoff.may_speculate
    for step in range(WINDOW_STEPS * len(WINDOWS) + 1):
        num_tokens = 18 if payoff.may_speculate else 16
        payoff.observe(16, num_tokens, 1.0 if step == 10 else 0.01, has_draft_tokens=payoff.may_speculate)
    assert payoff.may_speculate
