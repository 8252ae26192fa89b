"""`Monkey`: kills and stops processes at moments that follow from a seed. Repairs nothing, and asks nobody.

A moment is a number of requests that have ended and a delay after that, so that the strikes of a run fall among its
requests however fast the machine is.
"""

import asyncio
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
"""A server whose HTTP processes die more often than that gives up, as it should."""

VICTIM_TIMEOUT_S = 60.0
"""How long to wait for a process of the kind to exist: it may be about to be started again."""

SHARE_OF_STOPS = 0.3
SHORT_STOP_S = (0.2, 1.0)
MAX_DELAY_S = 1.0
FIRST, LAST = 0.03, 0.9
"""The strikes fall between these fractions of the requests."""


class Target(StrEnum):
    """A kind of process."""

    WORKER = "worker"
    CORE = "core"
    HTTP = "http process"
    APPLICATION = "application"


class Action(StrEnum):
    """What is done to one."""

    KILL = "killed"
    STOP = "stopped, went on"
    """For so short a time that nobody should mind."""
    HANG = "stopped for long"
    """For longer than the engine waits for it."""


@dataclass(frozen=True)
class Strike:
    """One thing that shall be done."""

    target: Target
    action: Action
    num_ended: int
    """Due when so many requests have ended,"""
    delay_s: float
    """and so much time has passed since."""
    duration_s: float = 0.0
    """Of a stop."""


@dataclass(frozen=True)
class Deed:
    """One thing that was done."""

    strike: Strike
    time_s: float
    """On the machine's monotonic clock."""
    num_live: int
    """Requests that were under way."""


def plan_strikes(
    seed: int, num_requests: int, num_kills: int, targets: Sequence[Target], hang_s: float
) -> list[Strike]:
    """Return strikes with so many kills (and long stops) among them, spread over all targets, and some short stops.

    Args:
        seed: that everything follows from.
        num_requests: of the run.
        num_kills: strikes of which the victim, or its engine, has to recover.
        targets: at least one.
        hang_s: longer than the engine waits for a process that is stopped.
    """
    rng = random.Random(f"strikes {seed}")
    chosen = [targets[number % len(targets)] for number in range(num_kills)]
    rng.shuffle(chosen)
    strikes = []
    for target in chosen:
        is_hang = target in (Target.CORE, Target.WORKER) and rng.random() < SHARE_OF_STOPS
        strikes.append((target, Action.HANG if is_hang else Action.KILL, hang_s))
    num_stops = round(num_kills * SHARE_OF_STOPS)
    strikes += [(rng.choice(targets), Action.STOP, rng.uniform(*SHORT_STOP_S)) for _ in range(num_stops)]
    rng.shuffle(strikes)
    moments = sorted(round(num_requests * rng.uniform(FIRST, LAST)) for _ in strikes)
    return [
        Strike(target, action, moment, rng.uniform(0.0, MAX_DELAY_S), 0.0 if action is Action.KILL else duration_s)
        for (target, action, duration_s), moment in zip(strikes, moments, strict=True)
    ]


class Monkey:
    """Strikes, and remembers.

    Args:
        strikes: in order of their moments.
        seed: that the victims among several of a kind follow from.
        find: the processes that a strike may be at.
        count_live: requests under way.
    """

    def __init__(
        self,
        strikes: Sequence[Strike],
        seed: int,
        find: Callable[[Strike], list[Process]],
        count_live: Callable[[], int],
    ) -> None:
        self.deeds: list[Deed] = []
        self.missed: list[Strike] = []
        """For which no victim was found."""
        self.on_done: Callable[[], object] = lambda: None
        """Called after each strike."""
        self._pending = list(strikes)
        self._rng = random.Random(f"victims {seed}")
        self._find = find
        self._count_live = count_live
        self._num_ended = 0
        self._moved = asyncio.Event()
        self._http_kills: deque[float] = deque(maxlen=MAX_HTTP_KILLS)
        self._awakenings: set[asyncio.Task[None]] = set()

    @property
    def next_moment(self) -> int | None:
        """How many requests must have ended for the next strike; None: there is none."""
        return self._pending[0].num_ended if self._pending else None

    def note_ended(self, num_ended: int) -> None:
        """So many requests have ended by now."""
        self._num_ended = num_ended
        self._moved.set()

    def explains_break(self, time_s: float, within_s: float) -> bool:
        """Whether a connection that broke at a time did so because of a kill shortly before."""
        kills = [deed for deed in self.deeds if deed.strike.action is Action.KILL]
        return any(deed.strike.target is Target.HTTP and 0 <= time_s - deed.time_s <= within_s for deed in kills)

    async def run(self) -> None:
        """Strike until there is nothing left to do, and let go on what was stopped."""
        try:
            while self._pending:
                await self._wait_for(self._pending[0].num_ended)
                strike = self._choose()
                await asyncio.sleep(strike.delay_s)
                await self._do(strike)
                self._pending.remove(strike)
                self.on_done()
            if self._awakenings:
                await asyncio.wait(self._awakenings)
        finally:
            for task in self._awakenings:
                task.cancel()

    async def _wait_for(self, num_ended: int) -> None:
        while self._num_ended < num_ended:
            self._moved.clear()
            await self._moved.wait()

    def _choose(self) -> Strike:
        """Return the next strike, but none yet that would have the server give up, while there is another."""
        if self._http_pause_s <= 0:
            return self._pending[0]
        return next((strike for strike in self._pending if not _kills_http(strike)), self._pending[0])

    @property
    def _http_pause_s(self) -> float:
        if len(self._http_kills) < MAX_HTTP_KILLS:
            return 0.0
        return self._http_kills[0] + HTTP_KILLS_WINDOW_S - time.monotonic()

    async def _do(self, strike: Strike) -> None:
        if _kills_http(strike):
            await asyncio.sleep(max(0.0, self._http_pause_s))
        victim = await self._victim(strike)
        number = signal.SIGKILL if strike.action is Action.KILL else signal.SIGSTOP
        if victim is None or not send_signal(victim, number):
            self.missed.append(strike)
            return
        self.deeds.append(Deed(strike, time.monotonic(), self._count_live()))
        if _kills_http(strike):
            self._http_kills.append(time.monotonic())
        if strike.duration_s:
            task = asyncio.create_task(_wake(victim, strike.duration_s))
            self._awakenings.add(task)
            task.add_done_callback(self._awakenings.discard)

    async def _victim(self, strike: Strike) -> Process | None:
        deadline = time.monotonic() + VICTIM_TIMEOUT_S
        while time.monotonic() < deadline:
            if found := self._find(strike):
                return self._rng.choice(sorted(found, key=lambda process: process.pid))
            await asyncio.sleep(0.05)
        return None


def _kills_http(strike: Strike) -> bool:
    return strike.target is Target.HTTP and strike.action is Action.KILL


async def _wake(process: Process, after_s: float) -> None:
    try:
        await asyncio.sleep(after_s)
    finally:
        send_signal(process, signal.SIGCONT)
