"""Random load on the scheduler: each request gets the same tokens as alone."""

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from core_fakes import FakeEngine, Output, alone
from examples import examples
from hypothesis import HealthCheck, given, settings

from octavo.protocol.events import Failed, FinishReason


@dataclass(frozen=True)
class Arrival:
    """One request of a storm."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: dict[str, object]
    priority: int
    cache_salt: str | None
    num_turns_before: int
    abort_after: int | None
    """Turns after which the client gives up."""
    num_resumed: int
    """Outputs it had before, from another life of the engine."""


# Few distinct tokens and a common stem, so that prefixes are shared and torn apart again.
stems = st.sampled_from([(), (1,) * 9, (1,) * 16, (1, 2) * 10])
prompts = st.builds(lambda stem, tail: stem + tuple(tail), stems, st.lists(st.integers(0, 3), min_size=1, max_size=20))
samplings = st.fixed_dictionaries(
    {"seed": st.integers(0, 2)},
    optional={
        "eos_token_ids": st.just((0, 1, 2, 3)),
        "stop_token_ids": st.just((4, 5, 6)),
        "min_tokens": st.integers(0, 3),
        "logprobs": st.just(0),
        "prompt_logprobs": st.just(0),
        "skip_reading_prefix_cache": st.just(True),
    },
).map(lambda fields: {**fields, **({"skip_reading_prefix_cache": True} if "prompt_logprobs" in fields else {})})
arrivals = st.builds(
    Arrival,
    prompt=prompts,
    max_tokens=st.integers(3, 24),
    sampling=samplings,
    priority=st.integers(0, 2),
    cache_salt=st.sampled_from([None, None, "a"]),
    num_turns_before=st.integers(0, 6),
    abort_after=st.one_of(st.none(), st.none(), st.integers(0, 12)),
    num_resumed=st.sampled_from([0, 0, 0, 2]),
)
engines = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([18, 24, 64]),
        "block_size": st.sampled_from([2, 4, 8]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.sampled_from([6, 9, 16, 40]),
        "full_step_tokens": st.sampled_from([0, 4, 12]),
        "decode_interval_tokens": st.sampled_from([0, 8, 30]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 3]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "enable_prefix_caching": st.booleans(),
        "async_scheduling": st.booleans(),
        "num_scheduler_steps": st.sampled_from([1, 2, 8]),
    }
).map(lambda engine: {**engine, "max_model_len": min(90, engine["num_blocks"] * engine["block_size"])})


def check_storm(engine_settings: dict, storm: list[Arrival]) -> None:
    engine = FakeEngine(**engine_settings)
    aborts: dict[int, list[str]] = {}
    expected: dict[str, Output] = {}
    turn = 0
    for index, arrival in enumerate(storm):
        for _ in range(arrival.num_turns_before):
            turn = run_turn(engine, turn, aborts)
        name = str(index)
        whole = alone(list(arrival.prompt), arrival.max_tokens, **arrival.sampling)
        resumed = whole.token_ids[: arrival.num_resumed]
        expected[name] = Output(whole.token_ids[len(resumed) :], whole.logprobs[len(resumed) :], whole.prompt_logprobs)
        if resumed:
            expected[name].prompt_logprobs = None
        engine.submit(
            name,
            list(arrival.prompt),
            arrival.max_tokens,
            priority=arrival.priority,
            cache_salt=arrival.cache_salt,
            resume_output_token_ids=resumed,
            **arrival.sampling,
        )
        if arrival.abort_after is not None:
            aborts.setdefault(turn + arrival.abort_after, []).append(name)
    while aborts:
        turn = run_turn(engine, turn, aborts)
    engine.run()
    for name, output in engine.outputs.items():
        compare(output, expected[name], engine.config.max_model_len)


def run_turn(engine: FakeEngine, turn: int, aborts: dict[int, list[str]]) -> int:
    if engine.scheduler.has_requests or engine.scheduler.num_in_flight:
        engine.turn()
    engine.abort(*aborts.pop(turn, []))
    return turn + 1


def compare(output: Output, expected: Output, max_model_len: int) -> None:
    if isinstance(output.end, Failed):
        assert output.end.param in ("prompt", "max_tokens")
        return
    is_cut = output.end.reason in (FinishReason.ABORT, FinishReason.LENGTH)
    num_tokens = len(output.token_ids)
    assert output.token_ids == (expected.token_ids[:num_tokens] if is_cut else expected.token_ids)
    assert output.logprobs == expected.logprobs[: len(output.logprobs)]
    if num_tokens:
        assert output.prompt_logprobs == expected.prompt_logprobs


@pytest.mark.parametrize("is_async", [False, True])
@settings(max_examples=examples(30, 60), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(engine=engines, storm=st.lists(arrivals, min_size=1, max_size=10))
def test_a_storm_changes_no_token(is_async: bool, engine: dict, storm: list[Arrival]) -> None:
    check_storm({**engine, "async_scheduling": is_async}, storm)


@pytest.mark.long
@settings(max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(engine=engines, storm=st.lists(arrivals, min_size=1, max_size=25))
def test_a_long_storm_changes_no_token(engine: dict, storm: list[Arrival]) -> None:
    check_storm(engine, storm)


def test_the_storms_reach_what_they_are_for() -> None:
    """A storm without preemptions, sharing and aborts would prove little."""
    engine = FakeEngine(num_blocks=18, max_model_len=64, max_num_batched_tokens=9)
    for index in range(12):
        engine.submit(str(index), [1] * 9 + [index] * 5, 20)
        for _ in range(3):
            engine.turn()
    engine.abort("11")
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 3
    assert stats.prefix_cache_hits > 20
