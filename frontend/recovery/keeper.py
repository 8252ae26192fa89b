"""`EngineKeeper`: starts an engine of our own again when its core dies or hangs, until that is hopeless.

What becomes of the requests is the link's business; when to try again is decided in `protocol/restarts.py`.
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
"""How often a core that owes something is looked at. Ticks are counted, not seconds: while this process is stopped the
core may well have answered."""


class Engine(Protocol):
    """The part of `LaunchedEngine` that is needed here."""

    def kill(self) -> None:
        """End the core at once."""

    def read_pulse(self) -> Pulse | None:
        """Return what the latest core said of itself, also after its death; None: nothing."""

    async def restart(self, cause: str) -> None:
        """Start another one and wait until it is ready; `cause`: how the one before has ended."""


class Link(Protocol):
    """The part of `CoreLink` that is needed here."""

    failure: EngineDeadError | None
    num_heard: int
    last_words: str

    @property
    def is_up(self) -> bool:
        """True while there is a core."""

    @property
    def is_owed_something(self) -> bool:
        """True while a core that lives owes an answer."""

    def lose(self, cause: str, kind: RestartCause) -> None:
        """The core is gone; there may be another."""

    def fail(self, cause: str) -> None:
        """There will be no other."""

    async def call(self, utility: Utility, timeout_s: float) -> object:
        """Make a utility call."""


class EngineKeeper:
    """Keeps one engine alive.

    Args:
        engine: started and watched.
        link: to it.
        hang_timeout_s: a core that owes an answer and says nothing for so long is killed; 0: none is.
        has_work: whether the core says, in shared memory, that it has; it may be other frontends' work.
    """

    def __init__(self, engine: Engine, link: Link, hang_timeout_s: float, has_work: Callable[[], bool]) -> None:
        self._engine = engine
        self._link = link
        self._hang_timeout_s = hang_timeout_s
        self._has_work = has_work
        self._policy = RestartPolicy()
        self._ready_s = time.monotonic()
        """Since when there is the present core."""
        self._hang = ""
        """Why the core was killed from here, until its end is noticed."""
        self._restarting: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._watching = asyncio.create_task(self._watch(), name="octavo engine: watch") if hang_timeout_s else None

    def on_exit(self, exited: ChildExited) -> None:
        """The core has ended; called by whoever watches its process."""
        kind: RestartCause = "core_hung" if self._hang else "core_died"
        cause, self._hang = self._hang or self._link.last_words or str(exited), ""
        if self._link.failure:  # it was told to stop, and has said so: nobody waits for another
            return
        if exited.code == EXIT_HOPELESS:
            self._link.fail(cause)
            return
        pulse = self._engine.read_pulse()
        has_lived_long = kind == "core_died" and time.monotonic() - self._ready_s >= LONG_LIFE_S
        if has_lived_long or (pulse and pulse.has_progressed):
            self._policy.progress()
        # The next one may die before it has said anything.
        self._link.last_words = ""
        # Its own last words, which say more, may still be on their way.
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._link.lose, cause, kind)
        self._restarting = asyncio.create_task(
            self._restart(cause, is_trial=pulse is not None and pulse.is_trying), name="octavo engine: restart"
        )

    async def close(self) -> None:
        """Start nothing any more; harmless the second time."""
        for task in (self._watching, self._restarting, self._asking):
            if task:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def _restart(self, death: str, *, is_trial: bool) -> None:
        """Try until there is a core again, or no hope."""
        cause = death
        while True:
            verdict = self._policy.fail(cause, is_trial=is_trial)
            if verdict.is_hopeless:
                self._link.fail(self._policy.root_cause)
                return
            logger.warning("%s: starting the engine again%s", cause, _soon(verdict.delay_s))
            await asyncio.sleep(verdict.delay_s)
            try:
                await self._engine.restart(death)
            except StartupError as error:
                cause, is_trial = str(error), False
            else:
                self._ready_s = time.monotonic()
                return

    async def _watch(self) -> None:
        """Kill a core that owes something and does not even answer a question."""
        num_silent_ticks, num_heard = 0, -1
        limit = max(2, round(self._hang_timeout_s / TICK_S))
        while True:
            await asyncio.sleep(TICK_S)
            is_owed = self._link.is_owed_something or (self._link.is_up and self._has_work())
            if not is_owed or self._link.num_heard != num_heard:
                num_silent_ticks, num_heard = 0, self._link.num_heard
                continue
            num_silent_ticks += 1
            if num_silent_ticks == limit // 2:  # whatever it answers, the link will have heard something
                self._asking = asyncio.create_task(self._ask(), name="octavo engine: question")
            elif num_silent_ticks >= limit:
                self._hang = f"the core has not answered for {num_silent_ticks * TICK_S:.0f} s"
                num_silent_ticks = 0
                self._engine.kill()

    async def _ask(self) -> None:
        with contextlib.suppress(OctavoError):
            await self._link.call(GetStats(), timeout_s=self._hang_timeout_s)


def _soon(delay_s: float) -> str:
    return f" in {delay_s:g} s" if delay_s else ""
