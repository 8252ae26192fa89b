"""`EngineSupervisor`: restarts our own engine when its core dies or hangs, until the restart policy gives up.

The link handles the requests; `protocol/restarts.py` decides when to retry.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Protocol

from octavo.frontend.metrics.observer import RestartCause
from octavo.frontend.wire import LAST_WORDS_S
from octavo.protocol.errors import EngineDeadError, OctavoError, StartupError
from octavo.protocol.lifecycle import EXIT_HOPELESS
from octavo.protocol.pulse import Pulse
from octavo.protocol.requests import GetStats, Utility
from octavo.protocol.restarts import LONG_LIFE_S, RestartPolicy
from octavo.protocol.supervise import ChildExited

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""Seconds between checks of a core that owes a reply. Ticks are counted instead of time: if this process was suspended,
the core may have replied meanwhile."""


class RestartableEngine(Protocol):
    """The part of `LaunchedEngine` that is used here."""

    def kill(self) -> None:
        """End the core at once."""

    def read_pulse(self) -> Pulse | None:
        """Return the latest core's pulse, even after its death. `None` if it never had one."""

    async def restart(self, cause: str) -> None:
        """Start a new core and wait until it is ready; `cause` says how the previous one ended."""


class Link(Protocol):
    """The part of `CoreLink` that is used here."""

    failure: EngineDeadError | None
    num_heard: int
    last_words: str

    @property
    def is_up(self) -> bool:
        """Whether a core is up."""

    @property
    def expects_answer(self) -> bool:
        """Whether a core is up and owes a reply."""

    def lose(self, cause: str, kind: RestartCause) -> None:
        """Report that the core is gone, and another may follow."""

    def fail(self, cause: str) -> None:
        """Report that there will be no other core."""

    async def call(self, utility: Utility, timeout_s: float) -> object:
        """Make a utility call."""


class EngineSupervisor:
    """Keeps one engine alive.

    Args:
        engine: to restart.
        link: to its core.
        hang_timeout_s: a core that owes a reply and is silent for this many seconds is killed. 0: never.
        has_work: returns whether the core has work according to its pulse, possibly of other frontends.
        on_given_up: called with the cause after the engine was given up.
    """

    def __init__(
        self,
        engine: RestartableEngine,
        link: Link,
        hang_timeout_s: float,
        has_work: Callable[[], bool],
        on_given_up: Callable[[str], None] = lambda cause: None,
    ) -> None:
        self._engine = engine
        self._link = link
        self._hang_timeout_s = hang_timeout_s
        self._has_work = has_work
        self._on_given_up = on_given_up
        self._policy = RestartPolicy()
        self._ready_s = time.monotonic()
        """Monotonic time at which the current core became ready."""
        self._hang = ""
        """Why we killed the core; cleared when its exit is noticed."""
        self._restarting: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._watching = asyncio.create_task(self._watch(), name="octavo engine: watch") if hang_timeout_s else None

    def on_exit(self, exited: ChildExited) -> None:
        """Handle the end of the core; called by the watcher of its process."""
        kind: RestartCause = "core_hung" if self._hang else "core_died"
        cause, self._hang = self._hang or self._link.last_words or str(exited), ""
        if self._link.failure:  # an orderly shutdown: nobody waits for another core
            return
        if exited.code == EXIT_HOPELESS:
            self._give_up(cause)
            return
        pulse = self._engine.read_pulse()
        has_lived_long = kind == "core_died" and time.monotonic() - self._ready_s >= LONG_LIFE_S
        if has_lived_long or (pulse and pulse.has_progressed):
            self._policy.progress()
        # The next core may die before it sends anything.
        self._link.last_words = ""
        # Its last message, which says more, may still be in transit.
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._link.lose, cause, kind)
        self._restarting = asyncio.create_task(
            self._restart(cause, is_isolated=pulse is not None and pulse.is_isolating), name="octavo engine: restart"
        )

    async def close(self) -> None:
        """Stop supervising. Idempotent."""
        for task in (self._watching, self._restarting, self._probing):
            if task:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def _give_up(self, cause: str) -> None:
        self._link.fail(cause)
        self._on_given_up(cause)

    async def _restart(self, death: str, *, is_isolated: bool) -> None:
        """Restart until a core is ready or the policy gives up."""
        cause = death
        while True:
            decision = self._policy.fail(cause, is_isolated=is_isolated)
            if decision.is_hopeless:
                self._give_up(self._policy.root_cause)
                return
            logger.warning("%s: restarting the engine%s", cause, _delay_text(decision.delay_s))
            await asyncio.sleep(decision.delay_s)
            try:
                await self._engine.restart(death)
            except StartupError as error:
                cause, is_isolated = str(error), False
            else:
                self._ready_s = time.monotonic()
                return

    async def _watch(self) -> None:
        """Kill a core that owes a reply and does not reply to a probe either."""
        num_silent_ticks, num_heard = 0, -1
        limit = max(2, round(self._hang_timeout_s / TICK_S))
        while True:
            await asyncio.sleep(TICK_S)
            is_answer_due = self._link.expects_answer or (self._link.is_up and self._has_work())
            if not is_answer_due or self._link.num_heard != num_heard:
                num_silent_ticks, num_heard = 0, self._link.num_heard
                continue
            num_silent_ticks += 1
            if num_silent_ticks == limit // 2:  # any reply counts as a sign of life
                self._probing = asyncio.create_task(self._probe(), name="octavo engine: probe")
            elif num_silent_ticks >= limit:
                self._hang = f"the core has not answered for {num_silent_ticks * TICK_S:.0f} s"
                num_silent_ticks = 0
                self._engine.kill()

    async def _probe(self) -> None:
        with contextlib.suppress(OctavoError):
            await self._link.call(GetStats(), timeout_s=self._hang_timeout_s)


def _delay_text(delay_s: float) -> str:
    return f" in {delay_s:g} s" if delay_s else ""
