"""Plans of several decode steps: when they are made, and that outputs are those of single steps."""

import random

import pytest
from core_fakes import FakeEngine, TimedEngine

from octavo.core_proc.scheduler.multi_step import MAX_INTERRUPTIBLE_SECONDS, MAX_SECONDS, MultiStep
from octavo.protocol.config import CacheGroupSpec
from octavo.protocol.events import Failed
from octavo.protocol.ids import pack_ids
from octavo.protocol.steps import NO_TOKEN, StepResult
from octavo.protocol.structured import GrammarKind, GrammarSpec

WINDOWS = (
    CacheGroupSpec(kind="full", num_layers=1, block_bytes=1000),
    CacheGroupSpec(kind="window", window=5, num_layers=1, block_bytes=1000),
)
STATES = (*WINDOWS, CacheGroupSpec(kind="state", window=16, num_layers=1, block_bytes=1000))


def steps(engine: FakeEngine) -> list[int]:
    return [plan.num_steps for plan in engine.plans]


def run_random(
    engine: FakeEngine, seed: int, aborts: bool = True, is_interrupted: bool = False
) -> dict[str, list[int]]:
    rng, events = random.Random(seed), random.Random(seed)
    for index in range(20):
        prompt = [rng.randrange(1, 50) for _ in range(rng.randint(1, 20))]
        fields = {"logprobs": 1} if rng.random() < 0.3 else {}
        if rng.random() < 0.5:
            fields |= {"stop_token_ids": tuple(rng.sample(range(1, 50), 4)), "min_tokens": rng.randint(0, 6)}
        engine.submit(f"r{index}", prompt, rng.randint(1, 30), seed=index, **fields)
        for _ in range(events.choice([0, 1, 3, 30])):
            if is_interrupted:
                engine.worker.max_steps = events.randint(1, 4)
            if engine.scheduler.has_requests:
                engine.turn()
        if aborts and events.random() < 0.1:
            engine.abort(f"r{events.randrange(index + 1)}")
        if aborts and events.random() < 0.05:
            engine.replace_worker()
    engine.run()
    return {name: output.token_ids for name, output in engine.outputs.items() if output.end.reason.name != "ABORT"}


@pytest.mark.parametrize(
    ("num_blocks", "groups", "is_async", "is_interrupted"),
    [
        (64, WINDOWS[:1], True, False),
        (64, WINDOWS, True, True),
        (40, WINDOWS, True, True),
        (40, WINDOWS, False, False),
        (64, STATES, True, False),
    ],
)
def test_outputs_are_those_of_single_steps(num_blocks, groups, is_async, is_interrupted) -> None:
    engine = FakeEngine(num_blocks, groups, num_scheduler_steps=4, async_scheduling=is_async)
    plain = FakeEngine(64, groups, async_scheduling=is_async)
    for seed in range(3):
        found = run_random(engine, seed, is_interrupted=is_interrupted)
        wanted = run_random(plain, seed, aborts=False)
        assert len(found) > 12
        assert found == {name: wanted[name] for name in found}
        for name in found:
            assert engine.outputs[name].logprobs == plain.outputs[name].logprobs
    assert {1, 4} <= set(steps(engine)) <= {1, 2, 3, 4}


def test_a_lone_request_gets_several_tokens_per_plan_and_not_one_too_many() -> None:
    engine = FakeEngine(num_scheduler_steps=4)
    engine.submit("a", [1, 2, 3], 12)
    engine.run()
    # Behind the prompt a step is planned, and another one before that is measured.
    assert steps(engine) == [1, 1, 1, 4, 4, 1]
    assert len(engine.outputs["a"].token_ids) == 12
    assert len(engine.plans[-1].scheduled) == 1


def test_a_new_request_interrupts_several_steps() -> None:
    engine, alone = FakeEngine(num_scheduler_steps=4), FakeEngine(num_scheduler_steps=4)
    output = engine.submit("a", [1, 2, 3], 30)
    engine.worker.max_steps = 2
    while not steps(engine) or steps(engine)[-1] == 1:
        engine.turn()
    num_known = len(output.token_ids)
    assert not engine.scheduler.may_plan(2)
    engine.submit("b", [4, 5], 30)
    assert engine.scheduler.may_plan(2)
    engine.plan()
    assert [part.num_tokens for part in engine.plans[-1].scheduled] == [2], "the prompt alone"
    engine.commit()
    assert len(output.token_ids) == num_known + 2
    engine.plan()
    assert [part.start for part in engine.plans[-1].scheduled] == [3 + num_known + 1, 2], "both decode"
    engine.run()
    wanted = alone.submit("a", [1, 2, 3], 30)
    alone.run()
    assert output.token_ids == wanted.token_ids


def interrupted(num_steps: int, prompt: list[int], max_steps: int = 4, groups=WINDOWS, **changes) -> FakeEngine:
    """Return an engine with a plan of several steps in flight, which ends after `num_steps`, and a request that
    waits."""
    engine = FakeEngine(64, groups, num_scheduler_steps=max_steps, **changes)
    engine.submit("a", prompt, 30)
    engine.worker.max_steps = num_steps
    while not steps(engine) or steps(engine)[-1] == 1:
        engine.turn()
    engine.submit("b", [4, 5, 6, 7, 8], 30)
    return engine


def test_steps_that_were_not_made_do_not_count() -> None:
    engine = interrupted(2, [1, 2, 3])
    counters = engine.scheduler.counters
    num_before = counters.step_tokens - 1
    engine.commit()
    assert counters.step_tokens == num_before + 2
    assert engine.scheduler.history.samples()[-1].num_decode_tokens == 2


def test_the_size_of_all_steps_together_does_not_keep_a_request_waiting() -> None:
    engine = interrupted(1, [1, 2, 3], full_step_tokens=4)
    assert engine.scheduler.may_plan(2), "the present step has one token"


def test_decodes_that_an_interrupting_plan_leaves_out_wait_no_longer_than_others() -> None:
    engine = interrupted(1, [1, 2, 3], decode_interval_tokens=5)
    engine.plan()
    engine.commit()
    engine.submit("c", [9, 8, 7], 30)
    engine.plan()
    assert [part.num_tokens for part in engine.plans[-1].scheduled] == [1, 1, 3], "five tokens were before those of a"


@pytest.mark.parametrize("num_prompt_tokens", range(1, 9))
def test_blocks_outside_windows_are_freed_after_a_vain_attempt_to_interrupt(num_prompt_tokens: int) -> None:
    firsts = []
    for tries in (False, True):
        engine = interrupted(4, [1] * num_prompt_tokens, max_num_seqs=1)
        assert not tries or engine.plan() is None, "b waits for the slot of a"
        engine.commit()
        engine.plan()
        firsts.append(list(engine.scheduler.running.first.first_blocks))
    assert firsts[0] == firsts[1]


def test_blocks_outside_windows_are_freed_while_spare_blocks_of_an_interrupted_plan_are_filled() -> None:
    engine = interrupted(1, [1, 2, 3], max_steps=16)
    request, (window,) = engine.scheduler.running.first, engine.scheduler.cache.groups.windowed
    engine.plan()  # the prompt of b
    engine.commit()
    num_blocks = request.num_blocks
    while request.num_blocks * 4 - request.num_computed_tokens > 4:
        engine.plan()
        assert request.first_blocks[1] == window.first_block(request.num_computed_tokens - 1)
        engine.commit()
    assert request.num_blocks == num_blocks and request.first_blocks[1] > 1


def test_several_steps_may_begin_at_the_end_of_a_block() -> None:
    """The request has passed blocks since it began this block, and holds them until the next plan."""
    windows = (CacheGroupSpec(kind="window", window=3, num_layers=1, block_bytes=1000),)
    limits = {"block_size": 8, "num_scheduler_steps": 10, "max_num_batched_tokens": 10, "max_num_seqs": 1}
    engine = FakeEngine(64, windows, async_scheduling=False, **limits)
    engine.submit("a", [1] * 8, 40)
    engine.submit("b", [2] * 8, 4)
    while not engine.plans or engine.plans[-1].scheduled[0].start < 14:
        engine.turn()
    engine.abort("b")
    engine.commit()
    engine.plan()
    assert engine.plans[-1].num_steps == 10
    engine.run()


@pytest.mark.parametrize(("groups", "changes"), [(STATES, {}), (WINDOWS, {"world_size": 2})])
def test_a_new_request_waits_for_workers_that_are_not_interrupted(groups, changes) -> None:
    engine = FakeEngine(64, groups, num_scheduler_steps=4, **changes)
    engine.submit("a", [1, 2, 3], 30)
    while not steps(engine) or steps(engine)[-1] == 1:
        engine.turn()
    engine.submit("b", [4, 5], 30)
    assert not engine.scheduler.may_plan(2)
    engine.commit()
    engine.plan()
    assert [part.num_tokens for part in engine.plans[-1].scheduled] == [1, 2], "both share the next step"
    engine.abort("a")
    engine.run()
    assert len(engine.outputs["b"].token_ids) == 30


def test_a_stop_token_ends_the_steps_if_no_other_request_goes_on() -> None:
    alone = FakeEngine(num_scheduler_steps=8)
    token_ids = alone.submit("a", [1, 2, 3], 20).token_ids
    alone.run()
    position = next(place for place in range(5, 20) if token_ids[place] not in token_ids[:place])
    engine = FakeEngine(num_scheduler_steps=8)
    output = engine.submit("a", [1, 2, 3], 20, stop_token_ids=(token_ids[position],))
    engine.run()
    assert output.token_ids == token_ids[: position + 1]
    assert output.end.stop_token_id == token_ids[position]
    assert engine.scheduler.counters.generation_tokens == position + 1
    assert engine.scheduler.counters.num_steps == position + 1, "those that were not made do not count"


@pytest.mark.parametrize(("num_requests", "num_steps"), [(1, 33), (6, 6)])
def test_the_budget_of_a_slow_machine_has_the_same_steps_for_each_request(num_requests: int, num_steps: int) -> None:
    limits = {"max_num_batched_tokens": 256, "num_scheduler_steps": 40, "step_time_target_s": 0.001}
    engine = TimedEngine(0.001, num_blocks=128, **limits)
    for first in (1, 2):  # the first is not measured
        engine.submit(f"warm-up {first}", [first] * 32, 1)
        engine.run()
    engine.seconds_per_token, num_before = 0.0, len(engine.plans)
    outputs = [engine.submit(f"r{index}", [index + 1, 2, 3], 60) for index in range(num_requests)]
    while engine.scheduler.has_requests:
        engine.turn()
        assert len({len(output.token_ids) for output in outputs}) == 1
    engine.run()
    assert max(steps(engine)[num_before:]) == num_steps


def test_one_step_while_a_request_needs_masks() -> None:
    engine = FakeEngine(num_scheduler_steps=4)
    output = engine.submit("a", [1, 2, 3], 40)
    while not steps(engine) or steps(engine)[-1] == 1:
        engine.turn()
    num_before = len(engine.plans)
    masked = engine.submit("b", [1, 2, 3], 6, grammar=GrammarSpec(GrammarKind.REGEX, "a*"))
    while masked.end is None:
        engine.turn()
    assert output.end is None
    assert set(steps(engine)[num_before:]) == {1}
    engine.run()
    assert 4 in steps(engine)[num_before:]


def test_one_step_while_a_request_waits() -> None:
    engine = FakeEngine(num_scheduler_steps=4, max_num_seqs=1)
    engine.submit("a", [1, 2, 3], 12)
    engine.submit("b", [1, 2, 3], 12)
    while "a" in {request.request_id for request in engine.scheduler.running} or not engine.plans:
        engine.turn()
    assert set(steps(engine)) == {1}, "b waits for the slot of a"
    engine.run()
    assert 4 in steps(engine)


def test_recurrent_states_are_kept_at_the_same_positions_as_by_single_steps() -> None:
    engine, plain = FakeEngine(64, STATES, num_scheduler_steps=12), FakeEngine(64, STATES)
    for one in (engine, plain):
        one.submit("a", [1, 2, 3], 57)
        one.run()
        kept = one.scheduler.cache.states.pool.cached_blocks().keys()
        assert len(kept) == 3, "after 16, 32 and 48 tokens"
    assert kept == engine.scheduler.cache.states.pool.cached_blocks().keys()
    assert max(steps(engine)) == 7, "the rest of a block, and a whole one"
    for plan in engine.plans:
        for part in plan.scheduled:
            assert part.start // 16 == (part.start + part.num_tokens - 1) // 16


def test_one_step_without_blocks() -> None:
    # Five blocks of four tokens: as many steps as fit into them, and a request that needs a sixth block is preempted.
    engine = FakeEngine(5, num_scheduler_steps=8, max_model_len=20)
    engine.submit("a", [1, 2, 3], 17)
    engine.submit("b", [4, 5, 6], 4)
    engine.run()
    assert [len(engine.outputs[name].token_ids) for name in "ab"] == [17, 4]


def test_as_many_steps_as_there_are_blocks_for() -> None:
    engine = FakeEngine(4, num_scheduler_steps=16, max_model_len=16)
    engine.submit("a", [1, 2, 3], 13)
    engine.submit("b", [4, 5, 6], 13)
    while not steps(engine) or steps(engine)[-1] == 1:
        engine.turn()
    assert [part.start + part.num_tokens for part in engine.plans[-1].scheduled] == [8, 8], "two blocks of four each"
    engine.run()
    assert [len(engine.outputs[name].token_ids) for name in "ab"] == [13, 13]


def test_a_request_without_numbers_keeps_what_came_before() -> None:
    engine = FakeEngine(num_scheduler_steps=4)
    output = engine.submit("a", [1, 2, 3], 30)
    while not steps(engine) or steps(engine)[-1] == 1:
        engine.turn()
    result, known = engine._results.popleft(), list(output.token_ids)
    engine._results.append(StepResult(result.sequence, pack_ids([7, 8, NO_TOKEN]), [], [], counts=[3]))
    engine.commit()
    assert output.token_ids == [*known, 7, 8]
    assert isinstance(output.end, Failed)


def measured(max_steps: int, num_requests: int, step_s: float) -> MultiStep:
    multi_step = MultiStep(max_steps)
    multi_step.observe(num_requests, step_s)
    return multi_step


@pytest.mark.parametrize(
    ("step_s", "num_steps"), [(MAX_SECONDS * 2, 1), (MAX_SECONDS / 3.5, 3), (MAX_SECONDS / 100, 8), (0.0, 8)]
)
def test_as_many_steps_as_fit_into_the_time(step_s: float, num_steps: int) -> None:
    assert MultiStep(8).max_steps(1) == 1, "no step was measured"
    multi_step = measured(8, 2, step_s)
    assert [multi_step.max_steps(num_requests) for num_requests in (0, 1, 2, 3)] == [1, num_steps, num_steps, 1]
    assert measured(1, 2, step_s).max_steps(2) == 1


def test_plans_that_are_interrupted_may_take_longer() -> None:
    multi_step = MultiStep(64, is_interruptible=True)
    multi_step.observe(1, MAX_INTERRUPTIBLE_SECONDS / 7.5)
    assert multi_step.max_steps(1) == 7
