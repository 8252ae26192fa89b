"""Engines that compute their steps together: a request that crashes the workers of another engine fails alone."""

import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from core_fakes import alone
from mortal_workers import Faults, MortalEngine, MortalGroup
from simulation.worker import SimulatedWorker

from octavo.core_proc.workers.engine_links import EngineLinks
from octavo.core_proc.workers.group import Turn, WorkerFailed
from octavo.core_proc.workers.isolation import IsolationTurns
from octavo.core_proc.workers.lock_step import LockStepPlace
from octavo.protocol.config import CachePlan
from octavo.protocol.events import Failed
from octavo.protocol.lock_step import IsolationState, IsolationTurn
from octavo.protocol.steps import StepPlan
from octavo.protocol.worker_commands import WorkerReply

POISON = 49
NUM_ENGINES = 2


def contains_poison(plan: StepPlan, worker: SimulatedWorker) -> bool:
    rows = {slot: row.admitted for slot, row in worker.rows.items() if slot not in plan.released}
    rows |= {admitted.slot: admitted for admitted in plan.admitted}
    return any(POISON in rows[part.slot].token_ids[: rows[part.slot].num_prompt_tokens] for part in plan.scheduled)


class LinkedGroup(MortalGroup):
    """Its requests crash the workers of the other engine, which has the experts that they chose."""

    links: EngineLinks
    other: Callable[[], "LinkedGroup"]
    is_stuck = False

    def advance(self, plan: CachePlan) -> bool:
        self._check()
        has_started = super().advance(plan)
        return has_started and not self.links.missing and not self.other().links.missing

    def gather(self) -> WorkerReply | None:
        if not self._failure:
            self._check()
        return super().gather()

    def take_turn(self, wants_turn: bool, is_idle: Callable[[], bool]) -> Turn:
        return self.links.take_turn(wants_turn, is_idle)

    def abandon(self) -> None:
        self.links.close()
        super().abandon()

    def _check(self) -> None:
        self.links.receive()
        if self.links.lost:
            raise WorkerFailed(self.links.lost, "other_engine", computed_ours=self.links.has_lost_workers)

    def _execute(self, plan: StepPlan) -> None:
        if self.is_stuck or self._failure:
            return
        if contains_poison(plan, self.worker):
            self.is_stuck = True
            self.other().die()
        else:
            super()._execute(plan)
            self.other().num_joined += 1


class LinkedEngine(MortalEngine):
    """One of two engines that compute their steps together."""

    def __init__(self, index: int, connect: Callable[[int], EngineLinks], engines: list["LinkedEngine"]) -> None:
        self._index, self._connect, self._engines = index, connect, engines
        engines.append(self)
        super().__init__(Faults(), max_num_seqs=4)

    def _make_group(self, number: int) -> LinkedGroup:
        group = LinkedGroup(number, self.config, self.plan, self.faults, self._make_group)
        group.links = self._connect(self._index)
        group.other = lambda: self._engines[1 - self._index].groups[-1]
        self.groups.append(group)
        return group


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[LinkedEngine]]:
    path = str(tmp_path / "lock-step")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()

        def connect(index: int) -> EngineLinks:
            place = LockStepPlace(path, listener.fileno())
            return place.connect(SimpleNamespace(engine_index=index, data_parallel_size=NUM_ENGINES))

        engines: list[LinkedEngine] = []
        for index in range(NUM_ENGINES):
            LinkedEngine(index, connect, engines)
        for engine in engines:
            engine.groups[0].links.receive()
        yield engines
        for engine in engines:
            engine.groups[-1].links.close()


def run(engines: list[LinkedEngine], rng: random.Random) -> None:
    for _ in range(20_000):
        if not any(engine.scheduler.has_requests for engine in engines):
            break
        rng.choice(engines).turn()
    for _ in range(10):  # the end of an isolation reaches all
        for engine in engines:
            engine.turn()


@pytest.mark.parametrize("seed", range(12))
def test_only_requests_that_crash_other_engines_fail(engines: list[LinkedEngine], seed: int) -> None:
    rng = random.Random(seed)
    guilty = {f"{rng.randrange(2)}.{rng.randrange(5)}" for _ in range(rng.randrange(1, 3))}
    prompts = {}
    for index in range(5):
        for number, engine in enumerate(engines):
            name = f"{number}.{index}"
            prompts[name] = [*[index + 1] * (4 + index), *[POISON] * (name in guilty)]
            engine.submit(name, prompts[name], 12)
            for _ in range(rng.choice([0, 0, 2, 10])):
                rng.choice(engines).turn()
    run(engines, rng)
    for name, prompt in prompts.items():
        output = engines[int(name[0])].outputs[name]
        assert isinstance(output.end, Failed) == (name in guilty), f"{name}: {output.end}"
        assert name in guilty or output.token_ids == alone(prompt, 12).token_ids
    for engine in engines:
        assert engine.scheduler.allowed is None and not engine.attribution.is_isolating


def test_the_only_request_of_an_engine_is_not_guilty_of_what_others_crash(engines: list[LinkedEngine]) -> None:
    rng = random.Random(0)
    engines[0].submit("0", [1, 2, POISON], 40)
    engines[1].submit("1", [1, 2], 40)
    run(engines, rng)
    assert isinstance(engines[0].outputs["0"].end, Failed)
    assert engines[1].outputs["1"].token_ids == alone([1, 2], 40).token_ids
    assert engines[1].scheduler.counters.worker_failures["exited"] <= 5


def test_cores_that_end_make_no_request_of_another_engine_suspicious(engines: list[LinkedEngine]) -> None:
    engines[0].submit("0", [1, 2], 40)
    for loss in range(1, 5):
        while not (engines[0].supervisor.is_ready and engines[0].scheduler.num_in_flight):
            for engine in engines:
                engine.turn()
        engines[1].groups[-1].links._socket.close()  # as the kernel does
        engines[1].groups[-1].die("other_engine")
        engines[1].groups[-1].links.lost = "it is dead"
        while engines[0].num_losses < loss:
            engines[0].turn()
        assert not engines[0].attribution.is_isolating
    run(engines, random.Random(0))
    assert engines[0].outputs["0"].token_ids == alone([1, 2], 40).token_ids


def test_turns() -> None:
    turns = IsolationTurns(3)
    assert not turns.update(0, IsolationState()) and turns.turn == IsolationTurn(0, -1)
    assert turns.update(2, IsolationState(wants_turn=True)) and turns.turn == IsolationTurn(1, 2)
    assert not turns.update(1, IsolationState(wants_turn=True, idle_in=1)), "it waits for engine 0"
    assert turns.update(0, IsolationState(idle_in=1)) and turns.turn == IsolationTurn(1, 2, is_alone=True)
    assert turns.update(2, IsolationState()) and turns.turn == IsolationTurn(2, 1), (
        "engine 0 was idle in an earlier turn"
    )
    assert not turns.update(2, IsolationState(idle_in=2))
    assert turns.leave(0) and turns.turn == IsolationTurn(2, 1, is_alone=True), "who leaves has no requests"
    assert turns.leave(1) and turns.turn == IsolationTurn(3, -1)
