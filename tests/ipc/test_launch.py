"""A launched engine whose fake cores are replaced: errors of the operating system, and what is left behind."""

import asyncio
import gc
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from core_fakes import core_config
from fake_child import STOPS
from servers import send_signal
from specs import PYTHONPATH
from waiting import TIMEOUT_S, until

from octavo.frontend import launch, spawn
from octavo.frontend.launch import LaunchedEngine, follow_start
from octavo.frontend.run_dir import RunDir
from octavo.frontend.spawn import SpawnedEngine
from octavo.frontend.timeline import Timeline
from octavo.protocol.control import CoreSpec
from octavo.protocol.errors import StartupError
from octavo.protocol.supervise import Child

Scenario = Callable[[LaunchedEngine, SpawnedEngine], Awaitable[None]]


@pytest.fixture(autouse=True)
def specs(monkeypatch: pytest.MonkeyPatch) -> list[CoreSpec]:
    """Let cores be `fake_child`; what each of them was told."""
    told: list[CoreSpec] = []

    def spawn_fake(module: str, spec: CoreSpec, name: str, inherited: Sequence[int], *, leads_group: bool) -> Child:
        told.append(spec)
        return real_spawn("fake_child", spec, name, {"PYTHONPATH": PYTHONPATH})

    real_spawn = Child.spawn
    monkeypatch.setattr(launch, "DRAIN_TIMEOUT_S", 0.1)  # a `fake_child` ends by a second SIGTERM
    monkeypatch.setattr(spawn.Child, "spawn", spawn_fake)
    return told


def run(tmp_path: Path, scenario: Scenario) -> None:
    async def main() -> None:
        spawned = SpawnedEngine(core_config(), None, RunDir(tmp_path), Timeline())
        engine = await follow_start(spawned)
        try:
            await asyncio.wait_for(scenario(engine, spawned), 60)
        finally:
            await engine.stop()

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == [], "files were left behind"


async def die(engine: LaunchedEngine) -> None:
    gone = asyncio.Event()
    engine.watch(lambda exited: gone.set())
    engine.kill()
    await asyncio.wait_for(gone.wait(), TIMEOUT_S)


def lives_in(spawned: SpawnedEngine) -> list[str]:
    return [path.name for path in spawned.run_dir.iterdir() if path.is_dir()]


def test_each_core_has_its_own_epoch_and_leaves_no_files(tmp_path: Path, specs: list[CoreSpec]) -> None:
    """A successor says which core was ended for it, also after one that never took over."""

    async def scenario(engine: LaunchedEngine, spawned: SpawnedEngine) -> None:
        gc.collect()  # earlier tests of this process may have left descriptors to the collector
        descriptors = len(os.listdir("/proc/self/fd"))
        await die(engine)
        await engine.restart("killed")
        await engine.replace(core_config())
        replacing = asyncio.create_task(engine.replace(core_config()))
        await until(lambda: len(specs) >= 4)
        replacing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await replacing
        await engine.replace(core_config())
        first, second, third, fourth, fifth = specs
        assert (second.predecessor_dir, second.predecessor_end) == (first.run_dir, "killed")
        assert first.predecessor_dir == third.predecessor_dir == "", "nobody has died"
        assert len({spec.epoch for spec in specs}) == 5
        assert first.replaced_epoch == second.replaced_epoch == 0
        assert third.replaced_epoch == second.epoch
        assert fourth.replaced_epoch == fifth.replaced_epoch == third.epoch, "the fourth has never taken over"
        assert len(lives_in(spawned)) == 1
        assert len(os.listdir("/proc/self/fd")) <= descriptors, "threads of earlier tests may have closed some"

    run(tmp_path, scenario)


def test_files_of_a_dead_core_stay_until_the_next_one_is_ready(tmp_path: Path, specs: list[CoreSpec]) -> None:
    async def scenario(engine: LaunchedEngine, spawned: SpawnedEngine) -> None:
        left = Path(specs[0].run_dir) / "left"
        left.touch()
        await die(engine)
        for _ in range(2):
            restarting = asyncio.create_task(engine.restart("killed"))
            await asyncio.sleep(0)
            restarting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await restarting
            assert left.exists()
        await engine.restart("killed")
        assert {spec.predecessor_dir for spec in specs[1:]} == {specs[0].run_dir}
        assert not left.exists()
        assert len(lives_in(spawned)) == 1

    run(tmp_path, scenario)


def test_a_start_that_the_system_rejects_is_a_failed_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody would try again, and requests would wait for ever."""

    def reject(*args: object, **settings: object) -> Child:
        raise BlockingIOError("no further process")

    async def scenario(engine: LaunchedEngine, spawned: SpawnedEngine) -> None:
        with monkeypatch.context() as rejected:
            rejected.setattr(spawn.Child, "spawn", reject)
            with pytest.raises(StartupError, match="no further process"):
                await engine.replace(core_config())
            await die(engine)
            with pytest.raises(StartupError, match="no further process"):
                await engine.restart("killed")
        await engine.restart("killed")
        assert len(lives_in(spawned)) == 1

    run(tmp_path, scenario)


def test_a_core_that_is_stopped_while_it_starts_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MIN_RESTART_TIMEOUT_S", 0.3)
    monkeypatch.setattr(launch, "RESTART_PATIENCE", 0.0)

    async def scenario(engine: LaunchedEngine, spawned: SpawnedEngine) -> None:
        await die(engine)
        with monkeypatch.context() as stopped:
            stopped.setenv(STOPS, "1")
            with pytest.raises(StartupError, match="not ready after"):
                await engine.restart("killed")
        monkeypatch.setattr(engine, "_restart_timeout_s", TIMEOUT_S)
        await engine.restart("killed")

    run(tmp_path, scenario)


def test_an_engine_that_ends_takes_its_successor_along(tmp_path: Path, specs: list[CoreSpec]) -> None:
    async def scenario(engine: LaunchedEngine, spawned: SpawnedEngine) -> None:
        replacing = asyncio.create_task(engine.replace(core_config()))
        await until(lambda: len(specs) >= 2, interval_s=0)
        await engine.stop()
        with pytest.raises(StartupError):
            await asyncio.wait_for(replacing, TIMEOUT_S)

    run(tmp_path, scenario)


def test_a_core_whose_start_is_given_up_ends_its_own_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else waits for them."""
    calls: list[str] = []
    terminate, kill = Child.terminate, Child.kill

    def note_terminate(child: Child) -> None:
        calls.append("terminate")
        send_signal(child.pid, signal.SIGTERM)
        if child.wait(0.1) is None:
            terminate(child)

    def note_kill(child: Child) -> None:
        calls.append("kill")
        kill(child)

    monkeypatch.setattr(Child, "terminate", note_terminate)
    monkeypatch.setattr(Child, "kill", note_kill)
    spawned = SpawnedEngine(core_config(), None, RunDir(tmp_path), Timeline())
    spawned.end()
    assert calls == ["terminate"]
    assert list(tmp_path.iterdir()) == []
