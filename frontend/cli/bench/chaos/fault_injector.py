"""`FaultInjector`: kills and stops processes at points that a seed determines.

A point is a number of finished requests plus a delay, so the faults are spread over the run on any machine, fast or
slow.
"""

import asyncio
import itertools
import random
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from octavo.frontend.cli.bench.chaos.processes import Process, send_signal

MAX_HTTP_KILLS = 3
HTTP_KILLS_WINDOW_S = 65.0
"""A server gives up by design if its HTTP processes die more often than allowed within this many seconds."""

VICTIM_TIMEOUT_S = 60.0
"""Seconds to wait for a process of the target kind, which may be restarting."""

SHARE_OF_STOPS = 0.3
SHORT_STOP_S = (0.2, 1.0)
MAX_DELAY_S = 1.0
FIRST, LAST = 0.03, 0.9
"""All injections happen between these fractions of the requests."""


class Target(StrEnum):
    """A kind of process, or all processes of a kind at the same time."""

    WORKER = "worker"
    CORE = "core"
    HTTP = "http process"
    APPLICATION = "application"
    ALL_WORKERS = "all workers"
    ALL_CORES = "all cores"

    @property
    def hits_all(self) -> bool:
        """Whether all processes are hit at the same time."""
        return self in (Target.ALL_WORKERS, Target.ALL_CORES)

    @property
    def can_hang(self) -> bool:
        """Whether the engine replaces the process if it is stopped for long."""
        return self not in (Target.HTTP, Target.APPLICATION)


class Action(StrEnum):
    """What happens to a process."""

    KILL = "killed"
    STOP = "stopped, went on"
    """A stop that is too short for any timeout."""
    HANG = "stopped for long"
    """A stop that is longer than the engine's timeouts."""


@dataclass(frozen=True)
class Injection:
    """A planned fault."""

    target: Target
    action: Action
    num_ended: int
    """The fault is due when this many requests have finished,"""
    delay_s: float
    """and this many seconds have passed since then."""
    duration_s: float = 0.0
    """Duration of a stop in seconds."""
    number: int = 0
    """Index of this injection among those with the same target: the workers' ranks are hit in turn."""


@dataclass(frozen=True)
class InjectedFault:
    """A fault that was injected."""

    injection: Injection
    time_s: float
    """Time just before the signal was sent, on the machine's monotonic clock."""
    num_live: int
    """Number of in-flight requests at that time."""
    num_hit: int = 1
    """Number of processes that were hit."""


def plan_injections(
    seed: int, num_requests: int, num_kills: int, targets: Sequence[Target], hang_s: float
) -> list[Injection]:
    """Return `num_kills` kills and long stops, spread over all targets, plus some short stops, in order.

    Args:
        seed: determines the plan.
        num_requests: number of requests of the run.
        num_kills: number of injections from which the process, or its engine, has to recover.
        targets: the targets, at least one.
        hang_s: duration of a long stop in seconds; longer than the engine's timeouts.
    """
    rng = random.Random(f"strikes {seed}")
    chosen = [targets[number % len(targets)] for number in range(num_kills)]
    rng.shuffle(chosen)
    injections = []
    for target in chosen:
        is_hang = target.can_hang and rng.random() < SHARE_OF_STOPS
        injections.append((target, Action.HANG if is_hang else Action.KILL, hang_s))
    num_stops = round(num_kills * SHARE_OF_STOPS)
    injections += [(rng.choice(targets), Action.STOP, rng.uniform(*SHORT_STOP_S)) for _ in range(num_stops)]
    rng.shuffle(injections)
    moments = sorted(round(num_requests * rng.uniform(FIRST, LAST)) for _ in injections)
    numbers = {target: itertools.count() for target in targets}
    return [
        Injection(
            target,
            action,
            moment,
            rng.uniform(0.0, MAX_DELAY_S),
            0.0 if action is Action.KILL else duration_s,
            next(numbers[target]),
        )
        for (target, action, duration_s), moment in zip(injections, moments, strict=True)
    ]


class FaultInjector:
    """Injects planned faults and records them.

    Args:
        injections: the faults, in the order in which they are due.
        seed: determines the victim if there are several processes of a kind.
        find: returns the processes that an injection may hit. If it hits all, returns none while one of them is
        missing.
        count_live: returns the number of in-flight requests.
    """

    def __init__(
        self,
        injections: Sequence[Injection],
        seed: int,
        find: Callable[[Injection], list[Process]],
        count_live: Callable[[], int],
    ) -> None:
        self.injected: list[InjectedFault] = []
        self.missed: list[Injection] = []
        """Injections that found no process."""
        self.on_done: Callable[[], object] = lambda: None
        """Called after each injection."""
        self._pending = list(injections)
        self._rng = random.Random(f"victims {seed}")
        self._find = find
        self._count_live = count_live
        self._num_ended = 0
        self._progress = asyncio.Event()
        self._http_kills: deque[float] = deque(maxlen=MAX_HTTP_KILLS)
        self._resumptions: set[asyncio.Task[None]] = set()

    @property
    def next_moment(self) -> int | None:
        """Number of finished requests at which the next injection is due; `None` if there is none."""
        return self._pending[0].num_ended if self._pending else None

    def note_ended(self, num_ended: int) -> None:
        """Set the number of finished requests."""
        self._num_ended = num_ended
        self._progress.set()

    def explains_break(self, time_s: float, within_s: float) -> bool:
        """Return whether an HTTP process was killed in the `within_s` seconds before `time_s`."""
        kills = [fault for fault in self.injected if fault.injection.action is Action.KILL]
        return any(fault.injection.target is Target.HTTP and 0 <= time_s - fault.time_s <= within_s for fault in kills)

    async def run(self) -> None:
        """Inject all faults. Processes that are still stopped at the end are resumed."""
        try:
            while self._pending:
                await self._wait_for(self._pending[0].num_ended)
                injection = self._choose()
                await asyncio.sleep(injection.delay_s)
                await self._carry_out(injection)
                self._pending.remove(injection)
                self.on_done()
            if self._resumptions:
                await asyncio.wait(self._resumptions)
        finally:
            for task in self._resumptions:
                task.cancel()

    async def _wait_for(self, num_ended: int) -> None:
        while self._num_ended < num_ended:
            self._progress.clear()
            await self._progress.wait()

    def _choose(self) -> Injection:
        """Return the next injection. Postpone kills of HTTP processes that would make the server give up."""
        if self._http_pause_s <= 0:
            return self._pending[0]
        return next((injection for injection in self._pending if not _kills_http(injection)), self._pending[0])

    @property
    def _http_pause_s(self) -> float:
        if len(self._http_kills) < MAX_HTTP_KILLS:
            return 0.0
        return self._http_kills[0] + HTTP_KILLS_WINDOW_S - time.monotonic()

    async def _carry_out(self, injection: Injection) -> None:
        if _kills_http(injection):
            await asyncio.sleep(max(0.0, self._http_pause_s))
        number = signal.SIGKILL if injection.action is Action.KILL else signal.SIGSTOP
        found = await self._victims(injection)
        time_s = time.monotonic()  # before the signal: clients may notice a death before this process runs again
        victims = [victim for victim in found if send_signal(victim, number)]
        if not victims:
            self.missed.append(injection)
            return
        self.injected.append(InjectedFault(injection, time_s, self._count_live(), len(victims)))
        if _kills_http(injection):
            self._http_kills.append(time.monotonic())
        if injection.duration_s:
            for victim in victims:
                task = asyncio.create_task(_resume(victim, injection.duration_s))
                self._resumptions.add(task)
                task.add_done_callback(self._resumptions.discard)

    async def _victims(self, injection: Injection) -> list[Process]:
        deadline = time.monotonic() + VICTIM_TIMEOUT_S
        while time.monotonic() < deadline:
            if found := self._find(injection):
                found = sorted(found, key=lambda process: process.pid)
                return found if injection.target.hits_all else [self._rng.choice(found)]
            await asyncio.sleep(0.05)
        return []


def _kills_http(injection: Injection) -> bool:
    return injection.target is Target.HTTP and injection.action is Action.KILL


async def _resume(process: Process, after_s: float) -> None:
    try:
        await asyncio.sleep(after_s)
    finally:
        send_signal(process, signal.SIGCONT)
