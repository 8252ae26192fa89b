"""`StallWatch`: says once of each stall of the engine what every process was doing. Mends nothing."""

import asyncio
import logging
import os
from collections.abc import Callable

from octavo.frontend.health import Health
from octavo.protocol.stacks import ProcessLook, look_at_tree

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often the engine's health is looked at, which asks nobody."""

ANSWER_S = 0.2
"""What a process gets to write its stacks before the next one is asked, so that they do not mix."""


class StallWatch:
    """Watches the health of an engine whose processes are below this one.

    Args:
        health: of the engine.
    """

    def __init__(self, health: Callable[[], Health]) -> None:
        self._health = health
        self._is_told = False
        """The present stall is in the log."""

    async def run(self) -> None:
        """Watch for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Look once, and write to the log what is new."""
        health = self._health()
        if not health.is_stalled:
            if self._is_told:
                logger.warning("the stall is over: %s", health.reason or "the engine moves again")
            self._is_told = False
        elif not self._is_told:
            self._is_told = True
            logger.error("%s; the stacks of all processes follow", health.reason)
            for process in look_at_tree(os.getpid()):
                logger.error("pid %d (%s) %s", process.pid, process.name, _what_follows(process))
                process.ask()
                await asyncio.sleep(ANSWER_S)


def _what_follows(process: ProcessLook) -> str:
    if not process.answers:
        return f"is in state {process.state} and tells no stacks"
    if process.is_stopped:
        return f"is stopped (state {process.state}): it tells its stacks when it goes on"
    return f"is in state {process.state}; its threads:"
