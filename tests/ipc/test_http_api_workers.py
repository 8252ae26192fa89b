"""Starting, replacing and ending further HTTP processes, with fake processes."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from servers import left_after
from specs import PYTHONPATH
from waiting import until

from octavo.frontend.http import api_workers
from octavo.frontend.http.api_workers import MAX_DEATHS, ApiWorkers
from octavo.frontend.http.listener import listen
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import OctavoError, StartupError

COUNT = 3


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setattr(api_workers, "RESTART_DELAY_S", 0.05)


class Family:
    """ApiWorkers, with what they have told of."""

    def __init__(self, behaviour: str, folder: Path) -> None:
        config = ServerConfig(port=0, api_server_count=COUNT, root_path=behaviour, api_key=["not in the arguments"])
        self.listener = listen(config)
        self.failures: list[OctavoError] = []
        self.is_engine_dead = False
        self.api_workers = ApiWorkers(
            config,
            ["not in the arguments"],
            f"ipc://{folder}/core",
            folder / "board",
            self.listener,
            lambda: self.is_engine_dead,
            self.failures.append,
            module="fake_api_worker",
        )


@contextlib.asynccontextmanager
async def family(behaviour: str, folder: Path) -> AsyncIterator[Family]:
    found = Family(behaviour, folder)
    try:
        yield found
    finally:
        await found.api_workers.kill()
        found.listener.close()


def arguments(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def play(behaviour: str, folder: Path, scenario: Callable[[Family], Awaitable[None]]) -> None:
    async def main() -> None:
        async with family(behaviour, folder) as one:
            await asyncio.wait_for(scenario(one), 60)

    asyncio.run(main())


def test_a_failed_start_names_the_root_cause(tmp_path: Path) -> None:
    async def scenario(one: Family) -> None:
        with pytest.raises(StartupError, match="the tokenizer is upside down") as raised:
            await one.api_workers.start()
        assert raised.value.hint == "turn it round"

    play("fail", tmp_path, scenario)


def test_they_are_ended_by_one_signal_and_their_keys_are_no_arguments(tmp_path: Path) -> None:
    async def scenario(one: Family) -> None:
        await one.api_workers.start()
        pids = one.api_workers.pids
        assert len(pids) == COUNT - 1
        assert not any("not in the arguments" in arguments(pid) for pid in pids)
        one.api_workers.terminate()
        await one.api_workers.wait(drain_timeout_s=30)
        assert not one.api_workers.pids and not left_after(pids) and not one.failures

    play("stay", tmp_path, scenario)


@pytest.mark.parametrize("hurries", [True, False])
def test_a_second_signal_hurries_them_and_the_end_of_patience_kills(tmp_path: Path, monkeypatch, hurries) -> None:
    monkeypatch.setattr(api_workers, "KILL_AFTER_S", 0.2)

    async def scenario(one: Family) -> None:
        await one.api_workers.start()
        pids = one.api_workers.pids
        one.api_workers.terminate()
        await asyncio.sleep(0.3)
        assert left_after(pids, 0) == pids, "they drain"
        if hurries:
            one.api_workers.terminate()
            await one.api_workers.wait(drain_timeout_s=30)
        else:
            await one.api_workers.wait(drain_timeout_s=0)
        assert not left_after(pids)

    play("drain", tmp_path, scenario)


def test_one_that_dies_is_replaced(tmp_path: Path) -> None:
    async def scenario(one: Family) -> None:
        await one.api_workers.start()
        first, second = one.api_workers.pids
        os.kill(first, signal.SIGKILL)
        await until(lambda: len(one.api_workers.pids) == COUNT - 1 and first not in one.api_workers.pids)
        assert second in one.api_workers.pids and not one.failures

    play("stay", tmp_path, scenario)


def test_none_is_replaced_when_the_engine_is_dead(tmp_path: Path) -> None:
    async def scenario(one: Family) -> None:
        await one.api_workers.start()
        one.is_engine_dead = True
        for pid in one.api_workers.pids:
            os.kill(pid, signal.SIGKILL)
        await one.api_workers.wait(drain_timeout_s=30)
        assert not one.api_workers.pids and not one.failures

    play("stay", tmp_path, scenario)


def test_processes_that_keep_dying_are_not_restarted(tmp_path: Path) -> None:
    async def scenario(one: Family) -> None:
        await one.api_workers.start()
        await until(lambda: one.failures)
        assert "exited with code 7" in str(one.failures[0])
        assert f"{MAX_DEATHS + 1}" in str(one.failures[0])

    play("die", tmp_path, scenario)
