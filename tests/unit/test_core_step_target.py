"""The token budget follows the measured time per token: no step much longer than the target, no starvation."""

from unittest import mock

import pytest
from core_fakes import FakeEngine, TimedEngine
from media_settings import media

from octavo.core_proc.scheduler.step_target import MIN_MEASURED_TOKENS, MIN_PROMPT_TOKENS, StepTarget
from octavo.protocol.buffers import Buffer
from octavo.protocol.events import Finished
from octavo.protocol.ids import SlotId
from octavo.protocol.media import MediaItem, MediaTensor, digest_of
from octavo.protocol.steps import Scheduled

MAX_TOKENS = 512


def chunk(num_tokens: int, start: int = 0) -> list[Scheduled]:
    return [Scheduled(SlotId(0), start, num_tokens, 0)]


def warm(target_s: float) -> StepTarget:
    """A target that has had the step that is not measured."""
    target = StepTarget(target_s, MAX_TOKENS)
    target.observe(chunk(MAX_TOKENS), MAX_TOKENS, 10.0)
    assert not target.cost.is_measured
    return target


def measured(target_s: float, seconds_per_token: float) -> StepTarget:
    target = warm(target_s)
    target.observe(chunk(256), 256, 256 * seconds_per_token)
    return target


def test_the_budget_is_what_fits_into_the_target():
    assert measured(0.2, 0.001).max_step_tokens(num_decodes=3) == 200


def test_a_fast_machine_keeps_its_largest_step():
    assert measured(0.2, 0.0001).max_step_tokens(num_decodes=3) == MAX_TOKENS


def test_without_a_target_or_a_measurement_nothing_is_limited():
    assert measured(0.0, 1.0).max_step_tokens(num_decodes=0) == MAX_TOKENS
    assert StepTarget(0.2, MAX_TOKENS).max_step_tokens(num_decodes=0) == MAX_TOKENS


def test_steps_with_few_prompt_tokens_and_steps_without_a_time_are_not_measured():
    target = warm(0.2)
    target.observe(chunk(MAX_TOKENS), MIN_MEASURED_TOKENS - 1, 1.0)
    target.observe(chunk(MAX_TOKENS), MAX_TOKENS, 0.0)
    assert not target.cost.is_measured


def test_a_machine_that_was_slow_for_a_while_gets_its_large_steps_back():
    target = measured(0.2, 1.0)
    for _ in range(50):
        num_tokens = target.max_step_tokens(0)
        target.observe(chunk(num_tokens), num_tokens, num_tokens * 0.001)
    assert target.max_step_tokens(0) == pytest.approx(200, abs=1)


def read_prompt(target: StepTarget, num_tokens: int, token_s: float, key_s: float) -> list[float]:
    """Return the times of the steps of a prompt whose tokens cost `token_s`, and `key_s` for each key before them."""
    times_s, start = [], 0
    while start < num_tokens:
        count = min(target.max_step_tokens(0, [start, 0]), num_tokens - start)
        times_s.append(count * (token_s + key_s * (start + count / 2)))
        target.observe(chunk(count, start), count, times_s[-1])
        start += count
    return times_s


@pytest.mark.parametrize(("token_s", "key_s"), [(0.3e-3, 1e-7), (0.6e-3, 1e-7), (3e-3, 1e-7), (0.5e-3, 0.0)])
def test_attention_to_a_long_prompt_is_part_of_the_prediction(token_s, key_s):
    target = warm(0.15)
    for _ in range(3):
        read_prompt(target, 6000, token_s, key_s)
        target.observe(chunk(64), 64, 64 * token_s)
    *times_s, _ = read_prompt(target, 6000, token_s, key_s)
    assert max(times_s) < 0.15 * 1.05
    assert min(times_s) > 0.15 * 0.95


def test_the_first_prompt_is_followed_too():
    *times_s, _ = read_prompt(warm(0.15), 6000, 0.3e-3, 1e-7)
    assert max(times_s[1:]) < 0.15 * 1.35


@pytest.mark.parametrize("key_s", [1e-7, 0.0])
def test_predicted_costs_are_positive_at_any_context_length(key_s):
    target = warm(0.15)
    for start, seconds_per_token in [(0, 1e-3), (6000, 1e-5), (0, 1e-5), (50_000, 1e-3), (6000, 1e-9), (0, 1e-9)] * 5:
        target.observe(chunk(64, start), 64, 64 * seconds_per_token)
        assert target.cost.is_measured
        assert MIN_PROMPT_TOKENS <= target.max_step_tokens(0, [start]) <= MAX_TOKENS
    for _ in range(20):
        read_prompt(target, 6000, 0.5e-3, key_s)
    *times_s, _ = read_prompt(target, 6000, 0.5e-3, key_s)
    assert min(times_s) > 0.15 * 0.9
    assert max(times_s) < 0.15 * 1.1


@pytest.mark.parametrize("num_decodes", [0, 100, MAX_TOKENS - 1])
def test_prompts_always_get_some_tokens(num_decodes):
    budget = measured(0.2, 1.0).max_step_tokens(num_decodes)
    assert budget == min(num_decodes + MIN_PROMPT_TOKENS, MAX_TOKENS)


def test_one_slow_step_does_not_shrink_the_next_by_much_and_a_lasting_change_is_followed():
    target = measured(0.2, 0.001)
    target.observe(chunk(200), 200, 0.8)
    assert target.max_step_tokens(0) > 150
    for _ in range(20):
        target.observe(chunk(200), 200, 0.4)
    assert target.max_step_tokens(0) == pytest.approx(100, abs=1)


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
    for number in range(2):
        engine.submit(f"warm-up {number}", [1 + (index + number) % 7 for index in range(80)], max_tokens=1)
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


def test_steps_that_encode_images_say_nothing_about_the_cost_of_a_token():
    engine = FakeEngine(media=media())
    with mock.patch.object(StepTarget, "observe", return_value=False) as observe:
        engine.submit("text", [1] * 20, max_tokens=1)
        engine.run()
        assert observe.called
        observe.reset_mock()
        pixels = {"pixels": MediaTensor("uint8", [1], Buffer(b"a"))}
        item = MediaItem([(3, 1)], digest_of(pixels), pixels)
        engine.submit("image@3a~", [2] * 20, max_tokens=1, media=[item])  # as simulated workers expect it
        engine.run()
        assert not observe.called
