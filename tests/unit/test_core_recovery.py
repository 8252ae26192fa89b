"""Lost workers, as seen by their supervisor and the scheduler: simulated groups and a simulated clock."""

import inspect
import math
import os
import random
from types import SimpleNamespace

import pytest
from core_fakes import CLIENT, alone, cache_plan, core_config
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from mortal_workers import START_TIMEOUT_S, STEP_TIMEOUT_S, Faults, MortalEngine, MortalGroup
from simulation.worker import SimulatedWorker

from octavo.core_proc.workers import starting
from octavo.core_proc.workers.group import WorkerFailed, WorkerGroup
from octavo.core_proc.workers.local import LocalWorkerGroup
from octavo.protocol.errors import StartupError
from octavo.protocol.events import Failed, FailureKind, Finished
from octavo.protocol.restarts import LONG_LIFE_S
from octavo.protocol.steps import StepPlan

POISON = 13


def contains_poison(plan: StepPlan, worker: SimulatedWorker) -> bool:
    rows = {slot: row.admitted for slot, row in worker.rows.items() if slot not in plan.released}
    rows |= {admitted.slot: admitted for admitted in plan.admitted}
    return any(POISON in rows[part.slot].token_ids[: rows[part.slot].num_prompt_tokens] for part in plan.scheduled)


def check_outputs(engine: MortalEngine, prompts: dict[str, tuple[list[int], int]], guilty: set[str]) -> None:
    for name, (prompt, max_tokens) in prompts.items():
        output = engine.outputs[name]
        if name in guilty:
            assert isinstance(output.end, Failed) and output.end.kind is FailureKind.INTERNAL
            assert "crashes the workers" in output.end.message
        else:
            expected = alone(prompt, max_tokens, logprobs=0)
            assert isinstance(output.end, Finished)
            assert (output.token_ids, output.logprobs) == (expected.token_ids, expected.logprobs)
    assert engine.scheduler.cache.pool.num_free == engine.plan.num_blocks
    assert len(engine.scheduler.free_slots) == engine.config.max_num_seqs


prompts = st.lists(st.integers(1, 12), min_size=1, max_size=20)


@settings(max_examples=examples(20, 40), deadline=None)
@given(
    st.lists(st.tuples(prompts, st.integers(1, 12), st.booleans()), min_size=1, max_size=12),
    st.integers(12, 40),
    st.integers(0, 2**16),
)
def test_poisoned_requests_fail_alone(asked: list[tuple[list[int], int, bool]], num_blocks: int, seed: int):
    """In a cache that is often too small, with requests that come while suspects run isolated."""
    engine = MortalEngine(Faults(is_fatal=contains_poison), num_blocks=num_blocks, max_restarts=100, max_num_seqs=4)
    requests = {
        str(index): ([*prompt, *[POISON] * is_poisoned], max_tokens)
        for index, (prompt, max_tokens, is_poisoned) in enumerate(asked)
    }
    guilty = {str(index) for index, (*_, is_poisoned) in enumerate(asked) if is_poisoned}
    rng = random.Random(seed)
    for name, (prompt, max_tokens) in requests.items():
        engine.submit(name, prompt, max_tokens, logprobs=0)
        for _ in range(rng.choice([0, 0, 1, 5, 30])):
            engine.turn()
    engine.run()
    check_outputs(engine, requests, guilty)
    assert engine.scheduler.allowed is None
    assert engine.num_losses <= len(guilty) * (5 + math.ceil(math.log2(4)))


@settings(max_examples=examples(20, 40), deadline=None)
@given(st.integers(0, 2**16), st.floats(0.02, 0.3))
def test_requests_outlive_any_accidents(seed: int, share: float):
    """Groups die, hang and do not start, at random."""
    rng = random.Random(seed)
    faults = Faults(
        is_fatal=lambda plan, worker: worker.next_sequence > 4 and rng.random() < share,
        hangs_at={(number, rng.randrange(6, 30)) for number in range(0, 50, 3)},
        failed_starts={number for number in range(1, 50) if rng.random() < 0.2},
        silent_starts={number for number in range(1, 50) if rng.random() < 0.1},
        unmade={number for number in range(1, 50) if rng.random() < 0.1},
    )
    engine = MortalEngine(faults, max_restarts=50)
    requests = {str(index): ([index % 3 + 1] * (5 + index % 7), 6 + index % 9) for index in range(rng.randrange(1, 14))}
    for name, (prompt, max_tokens) in requests.items():
        engine.submit(name, prompt, max_tokens, logprobs=0)
    engine.run()
    check_outputs(engine, requests, set())


def test_a_hang_is_a_death_after_the_time_that_a_step_may_take():
    engine = MortalEngine(Faults(hangs_at={(0, 3)}))
    engine.submit("r", [1, 2, 3], 8)
    before = engine.now
    engine.run()
    assert engine.scheduler.counters.worker_failures == {"hung": 1}
    assert STEP_TIMEOUT_S <= engine.now - before < STEP_TIMEOUT_S + 5
    assert engine.outputs["r"].token_ids == alone([1, 2, 3], 8).token_ids
    assert engine.scheduler.counters.requests_resumed == 1
    assert 0 <= engine.scheduler.counters.last_worker_pause_s < 5


def test_a_core_that_was_suspended_blames_no_worker():
    engine = MortalEngine(Faults(hangs_at={(0, 3)}))
    engine.submit("r", [1, 2, 3], 8)
    while engine.supervisor.timeout_s is None or engine.scheduler.num_in_flight < 2:
        engine.turn()
    engine.turn()
    engine.now += STEP_TIMEOUT_S + 100
    engine.supervisor.poll()
    assert engine.num_losses == 0
    engine.run()
    assert engine.num_losses == 1, "it did hang, as is seen when nobody sleeps"


def test_the_next_group_waits_for_the_end_of_the_last():
    """What dead workers still hold may be the memory that the next ones need."""
    engine = MortalEngine(Faults(hangs_at={(0, 1)}))
    engine.submit("r", [1, 2, 3], 8)
    while not engine.num_losses:
        engine.turn()
    first = engine.groups[0]
    first.looks_left = 10**6  # it does not end
    for _ in range(20):
        engine.turn()
    assert len(engine.groups) == 2 and not engine.supervisor.is_ready
    first.looks_left = 0
    engine.run()
    assert engine.outputs["r"].token_ids == alone([1, 2, 3], 8).token_ids


def test_restarts_back_off_and_end_with_the_first_cause():
    engine = MortalEngine(Faults(hangs_at={(0, 2)}, failed_starts=set(range(1, 99))), max_restarts=5)
    engine.submit("r", [1, 2, 3], 8)
    with pytest.raises(WorkerFailed, match=r"^the workers have not answered .* \(and 5 restarts after it failed\)$"):
        for _ in range(10_000):
            engine.turn()
    assert len(engine.groups) == 6
    assert engine.scheduler.counters.worker_failures == {"hung": 1, "not_started": 4}
    assert engine.outputs["r"].end is None, "it is left to its frontend"


def test_a_silent_start_is_a_failed_one():
    engine = MortalEngine(Faults(hangs_at={(0, 2)}, silent_starts={1}))
    engine.submit("r", [1, 2, 3], 8)
    before = engine.now
    engine.run()
    assert engine.scheduler.counters.worker_failures == {"hung": 1, "not_started": 1}
    assert engine.now - before >= STEP_TIMEOUT_S + START_TIMEOUT_S
    assert engine.outputs["r"].token_ids == alone([1, 2, 3], 8).token_ids


def test_steps_in_between_make_restarts_free():
    """Each life brings a step: that may go on for ever, and without delays."""
    engine = MortalEngine(Faults(is_fatal=lambda plan, worker: worker.next_sequence == 4), max_restarts=1)
    engine.submit("r", [1, 2, 3], 40)
    before = engine.now
    engine.run()
    assert engine.num_losses >= 5
    assert engine.now - before <= 2.0 * engine.num_losses, "a start takes two looks, a second each"
    assert engine.outputs["r"].token_ids == alone([1, 2, 3], 40).token_ids


@pytest.mark.parametrize("is_idle_for_long", [True, False])
def test_crashes_of_idle_workers_count_together_if_they_are_close(is_idle_for_long: bool):
    engine = MortalEngine(Faults(), max_restarts=3)

    def die() -> None:
        engine.now += LONG_LIFE_S if is_idle_for_long else 1.0
        engine.groups[-1].die()
        for _ in range(20):
            engine.turn()
        assert engine.supervisor.is_ready

    if is_idle_for_long:
        for _ in range(20):
            die()
    else:
        with pytest.raises(WorkerFailed, match="and 3 restarts after it failed"):
            for _ in range(4):
                die()


def test_an_abort_during_isolation_lets_the_others_go_on():
    engine = MortalEngine(Faults(is_fatal=contains_poison), max_restarts=100)
    for name in ("bad", "good"):
        engine.submit(name, [1, 2, *[POISON] * (name == "bad")], 30)
    while engine.scheduler.allowed != {(CLIENT, "bad")}:
        engine.turn()
    engine.take(engine.scheduler.abort(CLIENT, ["bad"]))
    engine.run()
    assert engine.scheduler.allowed is None
    assert engine.outputs["good"].token_ids == alone([1, 2], 30).token_ids


def test_a_pause_ends_with_the_last_request_that_waited():
    """Else it would last until somebody asks again."""
    engine = MortalEngine(Faults(hangs_at={(0, 2)}))
    engine.submit("r", [1, 2, 3], 8)
    while not engine.num_losses:
        engine.turn()
    while not engine.supervisor.is_ready:
        engine.turn()
    engine.take(engine.scheduler.abort(CLIENT, ["r"]))
    engine.supervisor.poll()
    assert engine.scheduler.counters.last_worker_pause_s > 0


def test_calls_for_workers_that_are_away_are_answered():
    engine = MortalEngine(Faults(hangs_at={(0, 1)}))
    engine.submit("r", [1, 2, 3], 8)
    answers: list[str] = []
    engine.supervisor.profile("/tmp", answers.append)
    while engine.supervisor.is_ready:
        engine.turn()
    engine.supervisor.profile("/tmp", answers.append)
    assert answers == ["", "the workers are restarting; try again later"]


def test_workers_that_owe_no_step_but_an_answer_hang_too():
    engine = MortalEngine(Faults(is_mute=True))
    answers: list[str] = []
    engine.supervisor.profile("/tmp", answers.append)
    for _ in range(100):
        engine.turn()
    assert engine.scheduler.counters.worker_failures == {"hung": 1}
    assert len(answers) == 1 and "have not answered" in answers[0]
    assert engine.supervisor.is_ready and engine.supervisor.timeout_s is None


def test_an_answer_ends_the_wait_for_it():
    engine = MortalEngine(Faults())
    engine.supervisor.profile("/tmp", lambda fault: None)
    assert engine.supervisor.timeout_s == STEP_TIMEOUT_S
    assert engine.supervisor.take_result() is None
    assert engine.supervisor.timeout_s is None


@pytest.mark.parametrize(
    ("limit", "phase"), [("ALLOCATE_TIMEOUT_S", "allocating the KV cache"), ("WARM_UP_TIMEOUT_S", "warming up")]
)
def test_a_start_that_takes_too_long_names_its_phase(limit: str, phase: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(starting, limit, 0.01)
    monkeypatch.setattr(LocalWorkerGroup, "_have_all_replied", lambda self: False)
    monkeypatch.setattr(LocalWorkerGroup, "broadcast", lambda self, command: None)
    monkeypatch.setattr(LocalWorkerGroup, "next_sequence", 0)
    monkeypatch.setattr(LocalWorkerGroup, "waitables", [])
    group = LocalWorkerGroup.__new__(LocalWorkerGroup)
    reader, writer = os.pipe()
    stop = SimpleNamespace(count=0, fileno=lambda: reader)
    start = {
        "warming up": lambda: group.warm_up(stop),
        "allocating the KV cache": lambda: group.allocate(cache_plan(core_config()), stop),
    }[phase]
    with pytest.raises(StartupError, match="did not become ready in time") as caught:
        start()
    assert caught.value.phase == phase
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("kind", [LocalWorkerGroup, MortalGroup])
def test_every_group_implements_the_whole_protocol(kind: type):
    members = {name: member for name, member in vars(WorkerGroup).items() if not name.startswith("_")}
    assert {"start", "allocate", "facts", "broadcast", "gather", "restart"} <= set(members)
    group = kind.__new__(kind) if kind is LocalWorkerGroup else MortalEngine(Faults()).groups[0]
    for name, member in members.items():
        assert name in dir(group), name
        if not isinstance(member, property):
            expected, actual = (list(inspect.signature(method).parameters) for method in (member, getattr(kind, name)))
            assert actual == expected, name
