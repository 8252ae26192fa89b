"""Engines that divide the experts: their cores form a group, begin the same steps, and lose it together."""

import os
import random
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from core_fakes import alone
from mortal_workers import Faults, MortalEngine

from octavo.core_proc.workers.engine_links import EngineLinks
from octavo.core_proc.workers.group import WorkerFailed
from octavo.core_proc.workers.lock_step import LockStepPlace, LockStepWorkerGroup
from octavo.frontend.recovery.replacement import require_changeable
from octavo.protocol.config.lock_step import check_lock_step
from octavo.protocol.config.parallel import ParallelConfig
from octavo.protocol.errors import ConfigError, ConflictError
from octavo.protocol.steps import StepPlan

Start = Callable[[int], EngineLinks]


@pytest.fixture
def listener(tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "lock-step"))
        listener.listen()
        yield listener


@pytest.fixture
def start(listener: socket.socket, tmp_path: Path):
    """Return a function that makes the links of one of three engines, as a core that starts does."""
    made: list[EngineLinks] = []

    def make(engine: int) -> EngineLinks:
        place = LockStepPlace(str(tmp_path / "lock-step"), listener.fileno() if engine == 0 else -1)
        made.append(place.connect(SimpleNamespace(engine_index=engine, data_parallel_size=3)))
        return made[-1]

    yield make
    for links in made:
        links.close()


def receive(*engines: EngineLinks) -> None:
    """Deliver everything: what the first engine passes on arrives in the second turn."""
    for _ in range(2):
        for links in engines:
            links.receive()


def formed(start: Start) -> list[EngineLinks]:
    engines = [start(engine) for engine in range(3)]
    receive(*engines)
    return engines


def test_a_group_is_formed_when_all_engines_are_there_and_shares_memory(start: Start) -> None:
    last, first = start(2), start(0)
    receive(first, last)
    assert first.missing == "engine 1" and first.take_memory() == last.take_memory() == -1
    engines = [first, start(1), last]
    receive(*engines)
    descriptors = [links.take_memory() for links in engines]
    os.write(descriptors[0], b"rows")
    assert [os.pread(descriptor, 4, 0) for descriptor in descriptors] == [b"rows"] * 3
    for descriptor in descriptors:
        os.close(descriptor)
    assert not any(links.missing or links.lost or links.take_memory() >= 0 for links in engines)


def test_later_engines_wait_for_a_first_one_that_starts_anew(start: Start) -> None:
    one, first = start(1), start(0)
    first.receive()
    start(2).close()  # a core that died before the first engine has accepted it
    first.close()
    engines = [start(0), one]
    receive(*engines)
    assert engines[0].missing == "engine 2"
    engines.append(start(2))
    receive(*engines)
    assert not any(links.missing or links.lost for links in engines)


@pytest.mark.parametrize("engine", [0, 1, 2])
def test_all_lose_a_group_that_one_leaves(start: Start, engine: int) -> None:
    engines = formed(start)
    engines[engine].close()
    others = [links for links in engines if links is not engines[engine]]
    receive(*others)
    assert engine == 0 or f"engine {engine} has lost its workers" in engines[0].lost
    engines[0].close()  # as its core does when it loses its workers
    receive(*others)
    assert all(links.lost for links in engines)


@pytest.mark.parametrize("seed", range(5))
def test_engines_begin_equally_many_steps(start: Start, seed: int) -> None:
    engines, choice = formed(start), random.Random(seed)
    for _ in range(200):
        links = choice.choice(engines)
        links.receive()
        if choice.random() < 0.5 or links.num_begun < links.most_begun:
            links.begin_step()
    receive(*engines)
    assert len({links.most_begun for links in engines}) == 1, "all know of the latest step"
    for links in engines:
        while links.num_begun < links.most_begun:
            links.begin_step()
    receive(*engines)
    assert {links.num_begun for links in engines} == {engines[0].most_begun}


def test_engines_leave_when_none_has_requests(start: Start) -> None:
    engines = formed(start)
    for links in (engines[0], engines[2]):
        links.leave()
    receive(*engines)
    assert not any(links.do_all_leave for links in engines)
    engines[1].leave()
    receive(*engines)
    assert all(links.do_all_leave for links in engines)


def test_a_group_joins_the_steps_of_others_without_rows(start: Start) -> None:
    engines = formed(start)
    sent: list[StepPlan] = []
    group = LockStepWorkerGroup.__new__(LockStepWorkerGroup)
    group._links, group._empty, group._children = engines[1], deque(), {}
    group._publisher = SimpleNamespace(send=sent.append, next_sequence=7)
    group.join_steps()
    assert not sent, "no step of others, no step here"
    engines[0].begin_step()
    engines[0].begin_step()
    group._check_alive()
    group.join_steps()
    group.join_steps()
    assert sent == [StepPlan(7, [], [], [], [])] * 2
    group.broadcast(StepPlan(7, [1], [], [], []))
    receive(*engines)
    assert engines[0].most_begun == engines[2].most_begun == 3
    engines[0].close()
    with pytest.raises(WorkerFailed, match="has lost its workers") as raised:
        group._check_alive()
    assert raised.value.cause == "other_engine"


def test_a_loss_elsewhere_suspects_no_request_and_is_no_failure_of_ours() -> None:
    engine = MortalEngine(Faults(), max_restarts=1)
    for name in ("a", "b"):
        engine.submit(name, [1, 2, 3], 8)
    for loss in range(1, 6):
        while not (engine.supervisor.is_ready and engine.scheduler.num_in_flight):
            engine.turn()
        engine.groups[-1].die("other_engine")
        while engine.num_losses < loss:
            engine.turn()
        assert not engine.attribution.is_isolating
    engine.run()
    assert engine.scheduler.counters.worker_failures == {"other_engine": 5}
    assert [output.token_ids for output in engine.outputs.values()] == [alone([1, 2, 3], 8).token_ids] * 2


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 2"),
        ({"data_parallel_backend": "ray"}, "data_parallel_backend ray"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend ray"),
        ({"nnodes": 2}, "nnodes 2"),
    ],
)
def test_combinations_that_are_not_built_are_named(settings: dict, found: str) -> None:
    experts = {"enable_expert_parallel": True, "data_parallel_size": 2}
    check_lock_step(ParallelConfig(**experts), "cpu", "auto")
    check_lock_step(ParallelConfig(**settings, data_parallel_size=2), "cpu", "auto")
    with pytest.raises(ConfigError, match=f"without pipeline stages: {found}"):
        check_lock_step(ParallelConfig(**experts, **settings), "cpu", "auto")
    for arguments in (("cuda", "auto"), ("cpu", "torch")):
        with pytest.raises(ConfigError, match="native kernels"):
            check_lock_step(ParallelConfig(**experts), *arguments)


def test_engines_that_divide_the_experts_cannot_come_and_go() -> None:
    for action in ("add", "remove", "replace"):
        with pytest.raises(ConflictError, match=f"{action}: the engines divide the experts"):
            require_changeable(SimpleNamespace(is_lock_step=True), action)
        require_changeable(SimpleNamespace(is_lock_step=False), action)
    require_changeable(SimpleNamespace(is_lock_step=True), "drain")
