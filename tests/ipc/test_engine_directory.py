"""How HTTP processes learn of engines: over a real socket, with engines that are only names."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from waiting import until

from octavo.frontend.engine_state import EngineState
from octavo.frontend.membership import directory as directory_module
from octavo.frontend.membership import follower as follower_module
from octavo.frontend.membership.directory import EngineDirectory
from octavo.frontend.membership.follower import Follower
from octavo.frontend.membership.messages import SOCKET_NAME, AdminCommand, AdminResult, EngineEntry
from octavo.protocol.errors import EngineDeadError, StartupError

STARTING, SERVING, DRAINING = EngineState.STARTING, EngineState.SERVING, EngineState.DRAINING


class FakeEngines:
    """Stands in for an `EngineSet`: engines have states and may be busy."""

    def __init__(self, indices: list[int]) -> None:
        self.states = dict.fromkeys(indices, SERVING)
        self.busy: set[int] = set()
        self.moving: set[int] = set()

    def __contains__(self, index: int) -> bool:
        return index in self.states

    def __getitem__(self, index: int) -> Any:
        return SimpleNamespace(index=index, state=self.states[index], link=SimpleNamespace(), pin_engine=lambda: None)

    @property
    def all(self) -> list[Any]:
        return [self[index] for index in sorted(self.states)]

    def add(self, index: int, connection: object) -> Any:
        self.states[index] = STARTING
        return self[index]

    def set_states(self, states: dict[int, EngineState]) -> None:
        self.states.update(
            {
                index: self.states[index].move(state)
                for index, state in states.items()
                if state is not self.states[index]
            }
        )

    def is_idle(self, index: int) -> bool:
        return index not in self.busy

    def move_requests(self, indices: list[int]) -> None:
        self.moving.update(indices)

    async def remove(self, index: int) -> None:
        del self.states[index]


class FakeClient:
    def __init__(self, *connections: object, indices: list[int]) -> None:
        self.engine_set = FakeEngines(indices)

    @property
    def engines(self) -> list[Any]:
        return self.engine_set.all


class Connection:
    async def close(self) -> None:
        """Nothing is open."""


class World:
    """A directory, its engines, and one process that follows it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[EngineEntry] = []
        self.silent: set[int] = set()
        """Engines that do not answer."""
        self.hanging: set[int] = set()
        """Engines that are waited for."""
        self.attempts: list[int] = []
        self.directory = EngineDirectory(self._execute, lambda: self.entries)

    async def __aenter__(self) -> "World":
        await self.directory.listen(self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.directory.close()

    async def follow(self) -> Follower:
        return await Follower.connect(str(self.path), self._join)

    def publish(self, *entries: tuple[int, EngineState], **flags: bool) -> int:
        self.entries = [EngineEntry(index, f"ipc:///{index}", state, **flags) for index, state in entries]
        return self.directory.publish()

    async def _join(self, entry: EngineEntry) -> Any:
        self.attempts.append(entry.index)
        if entry.index in self.hanging:
            await asyncio.Event().wait()
        if entry.index in self.silent:
            raise StartupError("no engine answers")
        return Connection()

    async def _execute(self, command: AdminCommand) -> AdminResult:
        if command.action == "replace":
            raise RuntimeError("a bug")
        return AdminResult(message=f"did {command.action}")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "AsyncClient", FakeClient)
    monkeypatch.setattr(follower_module, "JOIN_AGAIN_S", 0.001)
    monkeypatch.setattr(follower_module, "POLL_S", 0.001)


def run(tmp_path: Path, scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with World(tmp_path / SOCKET_NAME) as world:
            await scenario(world)

    asyncio.run(main())


async def started(world: World) -> tuple[Follower, FakeEngines]:
    follower = await world.follow()
    return follower, cast(FakeClient, await follower.client()).engine_set


def test_a_process_starts_with_the_engines_that_answer(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.entries = [
            EngineEntry(0, "ipc:///0", SERVING, is_gone=True),
            EngineEntry(1, "ipc:///1", SERVING),
            EngineEntry(2, "ipc:///2", SERVING),
            EngineEntry(3, "ipc:///3", DRAINING),
        ]
        world.silent = {1}
        follower, engines = await started(world)
        async with follower:
            assert engines.states == {2: SERVING}
            world.silent = set()
            await until(lambda: engines.states == {1: SERVING, 2: SERVING})
            assert not {0, 3} & set(world.attempts), "one is gone for good, and one is about to leave"

    run(tmp_path, scenario)


def test_an_engine_is_left_only_when_nobody_needs_it(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.publish((0, SERVING))
        follower, engines = await started(world)
        async with follower:
            world.publish((0, SERVING), (1, STARTING))
            await until(lambda: [report.joined for report in world.directory.reports] == [[0, 1]])
            engines.busy = {0}
            version = world.publish((0, DRAINING), (1, SERVING))
            await until(lambda: world.directory.reports[0].version == version)
            assert engines.states == {0: DRAINING, 1: SERVING}
            assert world.directory.reports[0].busy == [0]
            world.publish((0, DRAINING), (1, SERVING), is_leaving=True)
            await until(lambda: engines.moving == {0})
            engines.busy = set()
            await until(lambda: not world.directory.reports[0].busy)
            world.publish((1, SERVING))
            await until(lambda: world.directory.reports[0].joined == [1])
            assert engines.states == {1: SERVING}
        await until(lambda: not world.directory.reports)

    run(tmp_path, scenario)


def test_an_engine_that_is_removed_while_it_is_joined_does_not_block_the_next_of_its_index(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.publish((0, SERVING))
        follower, engines = await started(world)
        async with follower:
            world.hanging = {1}
            world.publish((0, SERVING), (1, STARTING))
            await until(lambda: 1 in world.attempts)
            world.hanging = set()
            world.publish((0, SERVING))
            world.publish((0, SERVING), (1, STARTING))
            await until(lambda: engines.states == {0: SERVING, 1: STARTING})

    run(tmp_path, scenario)


def test_an_answer_whose_caller_is_gone_is_dropped() -> None:
    def answer(call_id: int) -> bytes:
        body = msgspec.msgpack.encode(AdminResult(call_id=call_id))
        return len(body).to_bytes(4, "little") + body

    async def wait_closed() -> None:
        """Nothing is open."""

    async def main() -> None:
        reader = asyncio.StreamReader()
        nothing = SimpleNamespace(
            is_closing=lambda: False, write=lambda data: None, close=lambda: None, wait_closed=wait_closed
        )
        async with Follower(reader, cast(Any, nothing), cast(Any, None)) as follower:
            asking = asyncio.create_task(follower.execute(AdminCommand("list")))
            await asyncio.sleep(0)
            reader.feed_data(answer(1))
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            asking = asyncio.create_task(follower.execute(AdminCommand("list")))
            await asyncio.sleep(0)
            reader.feed_data(answer(2))
            assert (await asking).call_id == 2

    asyncio.run(main())


def test_commands_reach_the_first_process_and_fail_with_it(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.publish((0, SERVING))
        follower, _ = await started(world)
        async with follower:
            assert (await follower.execute(AdminCommand("drain", 0))).message == "did drain"
            failed = await follower.execute(AdminCommand("replace"))
            assert (failed.status, failed.message) == (500, "RuntimeError: a bug")
            asking = asyncio.create_task(follower.execute(AdminCommand("list")))
            await asyncio.sleep(0)
            await world.directory.close()
            with pytest.raises(EngineDeadError):
                await asking
            with pytest.raises(EngineDeadError):
                await follower.execute(AdminCommand("list"))

    run(tmp_path, scenario)


def test_a_process_that_does_not_follow_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is stopped would otherwise block an operator's command without a word."""
    monkeypatch.setattr(directory_module, "LATE_S", 0.01)

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if "have not applied" in record.getMessage()]

    async def scenario(world: World) -> None:
        world.publish((0, SERVING))
        follower, _ = await started(world)
        async with follower:
            version = world.publish((0, SERVING), (1, STARTING))
            await until(lambda: world.directory.reports[0].version == version)
            await until(lambda: world.directory._late_check is None)
            assert not lines()
            _, stopped = await asyncio.open_unix_connection(str(tmp_path / SOCKET_NAME))
            await until(lambda: len(world.directory.reports) == 2)
            world.publish((0, SERVING))
            await until(lambda: len(lines()) == 2)
            assert f"HTTP processes {os.getpid()} have" in lines()[0]
            stopped.close()
            await until(lambda: world.directory._late_check is None)

    run(tmp_path, scenario)


def test_without_a_first_process_there_is_no_other(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(StartupError, match="no HTTP process listens"):
            await Follower.connect(str(tmp_path / "nothing"), cast(Any, None))

    asyncio.run(main())
