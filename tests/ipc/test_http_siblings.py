"""Keeping further HTTP processes alive and ending them, with processes that serve nobody."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from http_client import until
from servers import left_after
from specs import PYTHONPATH

from octavo.frontend.http import siblings as siblings_module
from octavo.frontend.http.listener import listen
from octavo.frontend.http.siblings import MAX_DEATHS, Siblings
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import OctavoError, StartupError

COUNT = 3


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setattr(siblings_module, "RESTART_DELAY_S", 0.05)


class Family:
    """Siblings, with what they have told of."""

    def __init__(self, behaviour: str, folder: Path) -> None:
        config = ServerConfig(port=0, api_server_count=COUNT, root_path=behaviour, api_key=["not in the arguments"])
        self.listener = listen(config)
        self.failures: list[OctavoError] = []
        self.is_engine_dead = False
        self.siblings = Siblings(
            config,
            ["not in the arguments"],
            f"ipc://{folder}/core",
            folder / "board",
            self.listener,
            lambda: self.is_engine_dead,
            self.failures.append,
            module="fake_sibling",
        )


@contextlib.asynccontextmanager
async def family(behaviour: str, folder: Path) -> AsyncIterator[Family]:
    found = Family(behaviour, folder)
    try:
        yield found
    finally:
        await found.siblings.kill()
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
            await one.siblings.start()
        assert raised.value.hint == "turn it round"

    play("fail", tmp_path, scenario)


def test_they_are_ended_by_one_signal_and_their_keys_are_no_arguments(tmp_path: Path) -> None:
    async def scenario(one: Family) -> None:
        await one.siblings.start()
        pids = one.siblings.pids
        assert len(pids) == COUNT - 1
        assert not any("not in the arguments" in arguments(pid) for pid in pids)
        one.siblings.terminate()
        await one.siblings.wait(patience_s=30)
        assert not one.siblings.pids and not left_after(pids, 1) and not one.failures

    play("stay", tmp_path, scenario)


@pytest.mark.parametrize("hurries", [True, False])
def test_a_second_signal_hurries_them_and_the_end_of_patience_kills(tmp_path: Path, monkeypatch, hurries) -> None:
    monkeypatch.setattr(siblings_module, "KILL_AFTER_S", 0.2)

    async def scenario(one: Family) -> None:
        await one.siblings.start()
        pids = one.siblings.pids
        one.siblings.terminate()
        await asyncio.sleep(0.3)
        assert left_after(pids, 0) == pids, "they drain"
        if hurries:
            one.siblings.terminate()
            await one.siblings.wait(patience_s=30)
        else:
            await one.siblings.wait(patience_s=0)
        assert not left_after(pids, 1)

    play("drain", tmp_path, scenario)


def test_one_that_dies_is_replaced(tmp_path: Path) -> None:
    async def scenario(one: Family) -> None:
        await one.siblings.start()
        first, second = one.siblings.pids
        os.kill(first, signal.SIGKILL)
        await until(lambda: len(one.siblings.pids) == COUNT - 1 and first not in one.siblings.pids)
        assert second in one.siblings.pids and not one.failures

    play("stay", tmp_path, scenario)


def test_none_is_replaced_when_the_engine_is_dead(tmp_path: Path) -> None:
    async def scenario(one: Family) -> None:
        await one.siblings.start()
        one.is_engine_dead = True
        for pid in one.siblings.pids:
            os.kill(pid, signal.SIGKILL)
        await one.siblings.wait(patience_s=30)
        assert not one.siblings.pids and not one.failures

    play("stay", tmp_path, scenario)


def test_those_that_die_again_and_again_are_given_up(tmp_path: Path) -> None:
    async def scenario(one: Family) -> None:
        await one.siblings.start()
        await until(lambda: one.failures)
        assert "exited with code 7" in str(one.failures[0])
        assert f"{MAX_DEATHS + 1}" in str(one.failures[0])

    play("die", tmp_path, scenario)
