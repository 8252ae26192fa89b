"""When a core is restarted, when it is killed because it hangs, and when the supervisor gives up."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from octavo.frontend.recovery import engine_supervisor as module
from octavo.frontend.recovery.engine_supervisor import EngineSupervisor
from octavo.protocol import restarts
from octavo.protocol.errors import EngineDeadError, StartupError
from octavo.protocol.lifecycle import EXIT_HOPELESS
from octavo.protocol.pulse import Pulse
from octavo.protocol.requests import Utility
from octavo.protocol.supervise import ChildExited

KILLED = ChildExited("core", -9, None)


class FakeEngine:
    """Starts again as often as `failures` is empty."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.num_restarts = 0
        self.num_kills = 0
        self.pulse = Pulse(age_s=0.0, has_work=False)

    def kill(self) -> None:
        self.num_kills += 1

    def read_pulse(self) -> Pulse:
        return self.pulse

    async def restart(self, cause: str) -> None:
        self.num_restarts += 1
        self.pulse = Pulse(age_s=0.0, has_work=False)
        if self.failures:
            raise StartupError(self.failures.pop(0))


class FakeLink:
    """Owes something or does not."""

    is_up = True
    expects_answer = True
    failure: EngineDeadError | None = None

    def __init__(self) -> None:
        self.num_heard = 0
        self.last_words = ""
        self.lost: list[str] = []
        self.kinds: list[str] = []
        self.failed: list[str] = []
        self.num_calls = 0

    def lose(self, cause: str, kind: str) -> None:
        self.kinds.append(kind)
        self.lost.append(cause)

    def fail(self, cause: str) -> None:
        self.failed.append(cause)

    async def call(self, utility: Utility, timeout_s: float) -> object:
        self.num_calls += 1
        return None


Scenario = Callable[[EngineSupervisor, FakeEngine, FakeLink], Awaitable[None]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(module, "TICK_S", 0.01)


def run(scenario: Scenario, hang_timeout_s: float = 0.0) -> None:
    async def main() -> None:
        engine, link = FakeEngine(), FakeLink()
        supervisor = EngineSupervisor(engine, link, hang_timeout_s, has_work=lambda: False)
        try:
            await asyncio.wait_for(scenario(supervisor, engine, link), 20)
        finally:
            await supervisor.close()

    asyncio.run(main())


def test_a_crash_is_announced_and_the_core_restarted() -> None:
    async def scenario(supervisor: EngineSupervisor, engine: FakeEngine, link: FakeLink) -> None:
        supervisor.on_exit(KILLED)
        while not (engine.num_restarts and link.lost):
            await asyncio.sleep(0.01)
        assert link.lost == ["core was killed by SIGKILL"]
        assert link.failed == []
        assert link.kinds == ["core_died"]

    run(scenario)


def test_failed_starts_end_with_the_first_cause() -> None:
    async def scenario(supervisor: EngineSupervisor, engine: FakeEngine, link: FakeLink) -> None:
        engine.failures = ["no memory"] * 100
        supervisor.on_exit(KILLED)
        while not link.failed:
            await asyncio.sleep(0.01)
        assert "SIGKILL" in link.failed[0], "the root cause, not the last symptom"
        assert engine.num_restarts == restarts.MAX_RESTARTS

    run(scenario)


def test_the_last_message_of_a_core_is_the_root_cause() -> None:
    async def scenario(supervisor: EngineSupervisor, engine: FakeEngine, link: FakeLink) -> None:
        engine.failures = ["no memory"] * 100
        link.last_words = "a bug in the scheduler"
        supervisor.on_exit(ChildExited("core", 1, None))
        while not link.failed:
            await asyncio.sleep(0.01)
        assert "a bug in the scheduler" in link.failed[0]

    run(scenario)


def test_a_core_that_gave_up_its_workers_is_not_restarted() -> None:
    async def scenario(supervisor: EngineSupervisor, engine: FakeEngine, link: FakeLink) -> None:
        link.last_words = "worker 0 was killed by SIGKILL"
        supervisor.on_exit(ChildExited("core", EXIT_HOPELESS, None))
        assert link.failed == ["worker 0 was killed by SIGKILL"]
        await asyncio.sleep(0.05)
        assert engine.num_restarts == 0

    run(scenario)


def test_progress_makes_a_death_the_first_again() -> None:
    async def scenario(supervisor: EngineSupervisor, engine: FakeEngine, link: FakeLink) -> None:
        for number in range(3 * restarts.MAX_RESTARTS):
            engine.pulse = Pulse(age_s=0.0, has_work=False, has_progressed=True)
            supervisor.on_exit(KILLED)
            while engine.num_restarts == number:
                await asyncio.sleep(0)
        assert link.failed == []

    run(scenario)


def test_progress_counts_for_one_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores that die before the link has met them do not live on the merits of the first."""

    async def scenario(supervisor: EngineSupervisor, engine: FakeEngine, link: FakeLink) -> None:
        engine.pulse, link.last_words = Pulse(age_s=0.0, has_work=False, has_progressed=True), "a bug"
        for number in range(restarts.MAX_RESTARTS):
            supervisor.on_exit(KILLED)
            while engine.num_restarts == number:
                await asyncio.sleep(0.001)
        supervisor.on_exit(KILLED)
        while not link.failed:
            await asyncio.sleep(0.001)
        assert "a bug" in link.failed[0]
        assert link.lost[1:2] == ["core was killed by SIGKILL"], "the words of another core"

    monkeypatch.setattr(module, "LAST_WORDS_S", 0.0)
    run(scenario)


def test_isolated_crashes_are_limited_too() -> None:
    """Each tells something new; so many requests in a row that all kill the core are not the reason, though."""

    async def scenario(supervisor: EngineSupervisor, engine: FakeEngine, link: FakeLink) -> None:
        while not link.failed:
            number = engine.num_restarts
            engine.pulse = Pulse(age_s=0.0, has_work=True, is_isolating=True)
            supervisor.on_exit(KILLED)
            while engine.num_restarts == number and not link.failed:
                await asyncio.sleep(0)
        assert engine.num_restarts == restarts.MAX_ISOLATED_CRASHES
        assert "SIGKILL" in link.failed[0]

    run(scenario)


def test_crashes_far_apart_do_not_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that nobody asks anything may be killed every night for years."""
    monkeypatch.setattr(module, "LONG_LIFE_S", 0.0)

    async def scenario(supervisor: EngineSupervisor, engine: FakeEngine, link: FakeLink) -> None:
        for number in range(3 * restarts.MAX_RESTARTS):
            supervisor.on_exit(KILLED)
            while engine.num_restarts == number:
                await asyncio.sleep(0)
        assert link.failed == []

    run(scenario)


def test_an_engine_that_was_told_to_stop_stays_down() -> None:
    async def scenario(supervisor: EngineSupervisor, engine: FakeEngine, link: FakeLink) -> None:
        link.failure = EngineDeadError("the engine was shut down")
        supervisor.on_exit(ChildExited("core", 0, None))
        await asyncio.sleep(0.05)
        assert engine.num_restarts == 0

    run(scenario)


def test_a_silent_core_with_work_is_probed_and_then_killed() -> None:
    async def scenario(supervisor: EngineSupervisor, engine: FakeEngine, link: FakeLink) -> None:
        while not engine.num_kills:
            await asyncio.sleep(0.01)
        assert link.num_calls == 1
        supervisor.on_exit(KILLED)
        while not link.lost:
            await asyncio.sleep(0.01)
        assert "has not answered" in link.lost[0]
        assert link.kinds == ["core_hung"]

    run(scenario, hang_timeout_s=0.05)


@pytest.mark.parametrize("why", ["it speaks", "it owes nothing"])
def test_a_core_that_answers_or_has_no_work_is_not_killed(why: str) -> None:
    async def scenario(supervisor: EngineSupervisor, engine: FakeEngine, link: FakeLink) -> None:
        link.expects_answer = why == "it speaks"
        for _ in range(60):
            link.num_heard += why == "it speaks"
            await asyncio.sleep(0.005)
        assert engine.num_kills == 0

    run(scenario, hang_timeout_s=0.05)
