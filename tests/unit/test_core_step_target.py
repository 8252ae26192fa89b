"""The token budget follows the measured time per token: no step much longer than the target, no starvation."""

import msgspec
import pytest
from core_fakes import FakeEngine

from octavo.core_proc.scheduler.step_target import MIN_MEASURED_TOKENS, MIN_PROMPT_TOKENS, StepTarget
from octavo.protocol.events import Finished

MAX_TOKENS = 512


def measured(target_s: float, seconds_per_token: float) -> StepTarget:
    target = StepTarget(target_s, MAX_TOKENS)
    target.observe(256, 256 * seconds_per_token)
    return target


def test_the_budget_is_what_fits_into_the_target():
    assert measured(0.2, 0.001).max_step_tokens(num_decodes=3) == 200


def test_a_fast_machine_keeps_its_largest_step():
    assert measured(0.2, 0.0001).max_step_tokens(num_decodes=3) == MAX_TOKENS


def test_without_a_target_or_a_measurement_nothing_is_limited():
    assert measured(0.0, 1.0).max_step_tokens(num_decodes=0) == MAX_TOKENS
    assert StepTarget(0.2, MAX_TOKENS).max_step_tokens(num_decodes=0) == MAX_TOKENS


def test_small_steps_and_steps_without_a_time_are_not_measured():
    target = StepTarget(0.2, MAX_TOKENS)
    target.observe(MIN_MEASURED_TOKENS - 1, 1.0)
    target.observe(MAX_TOKENS, 0.0)
    assert not target.is_measured


def test_a_machine_that_was_slow_for_a_while_gets_its_large_steps_back():
    target = measured(0.2, 1.0)
    for _ in range(50):
        num_tokens = target.max_step_tokens(0)
        target.observe(num_tokens, num_tokens * 0.001)
    assert target.max_step_tokens(0) == pytest.approx(200, abs=1)


@pytest.mark.parametrize("num_decodes", [0, 100, MAX_TOKENS - 1])
def test_prompts_always_get_some_tokens(num_decodes):
    budget = measured(0.2, 1.0).max_step_tokens(num_decodes)
    assert budget == min(num_decodes + MIN_PROMPT_TOKENS, MAX_TOKENS)


def test_one_slow_step_does_not_shrink_the_next_by_much_and_a_lasting_change_is_followed():
    target = measured(0.2, 0.001)
    target.observe(200, 0.4)
    assert target.max_step_tokens(0) > 150
    for _ in range(20):
        target.observe(200, 0.4)
    assert target.max_step_tokens(0) == pytest.approx(100, abs=1)


class TimedEngine(FakeEngine):
    """A token takes so many seconds, on no clock: each result says how long its step took."""

    def __init__(self, seconds_per_token: float, **changes) -> None:
        super().__init__(**changes)
        self.seconds_per_token = seconds_per_token
        self.step_times_s: list[float] = []

    def plan(self):
        plan = super().plan()
        if plan is not None:
            elapsed_s = self.seconds_per_token * sum(chunk.num_tokens for chunk in plan.scheduled)
            self.step_times_s.append(elapsed_s)
            self._results[-1] = msgspec.structs.replace(self._results[-1], elapsed_s=elapsed_s)
        return plan


def storm(step_time_target_s: float) -> TimedEngine:
    """A stream, then a long prompt, then a short one."""
    engine = TimedEngine(
        0.001,
        num_blocks=256,
        max_model_len=900,
        max_num_batched_tokens=256,
        step_time_target_s=step_time_target_s,
        async_scheduling=False,
    )
    engine.submit("warm-up", [1 + index % 7 for index in range(80)], max_tokens=1)
    engine.run()
    engine.step_times_s.clear()
    engine.submit("stream", [1, 2, 3], max_tokens=40)
    engine.turn()
    engine.submit("long", [2 + index % 8 for index in range(800)], max_tokens=1)
    engine.turn()
    engine.submit("short", [1] * 20, max_tokens=1)
    engine.run()
    return engine


def test_no_step_of_a_storm_takes_much_longer_than_the_target_and_the_tokens_are_the_same():
    without, target = storm(0.0), storm(0.05)
    assert max(without.step_times_s) == pytest.approx(0.256)
    assert max(target.step_times_s) <= 0.05 + 1e-9
    for name, output in target.outputs.items():
        assert isinstance(output.end, Finished)
        assert output.token_ids == without.outputs[name].token_ids


@pytest.mark.parametrize(("step_time_target_s", "has_decode"), [(0.0, False), (1.0, True)])
def test_beside_a_long_prompt_decodes_are_in_every_step_that_has_a_target(step_time_target_s, has_decode):
    engine = FakeEngine(
        max_num_batched_tokens=16,
        decode_interval_tokens=100,
        step_time_target_s=step_time_target_s,
        async_scheduling=False,
    )
    stream = engine.submit("stream", [1, 2, 3], max_tokens=20)
    while not stream.token_ids:
        engine.turn()
    engine.submit("long", [4] * 40, max_tokens=1)
    engine.plan()
    engine.commit()
    engine.submit("short", [5] * 4, max_tokens=1)
    engine.plan()
    engine.commit()
    assert (engine.plans[-1].scheduled[0].num_tokens == 1) is has_decode
    engine.run()
