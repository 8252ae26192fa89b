"""`StallWatch`: logs the stacks of all processes once for each stall of an engine. It repairs nothing."""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping

from octavo.frontend.health import Health
from octavo.protocol.stacks import ProcessInfo, process_tree

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
"""Seconds between health checks, which send no message."""

DUMP_TIME_S = 0.2
"""Seconds that a process gets to write its stacks before the next process starts, so that they do not mix."""


class StallWatch:
    """Watches the health of engines whose processes are descendants of this one.

    Args:
        health: returns the health of each engine, by index.
        prefix: starts each line in the log.
    """

    def __init__(self, health: Callable[[], Mapping[int, Health]], prefix: str = "") -> None:
        self._prefix = prefix
        self._health = health
        self._reported: set[int] = set()
        """Indices of engines whose current stall has been logged."""

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await self.check()

    async def check(self) -> None:
        """Check once, and log the beginning or the end of each stall."""
        states = self._health()
        self._reported &= states.keys()
        for index, health in states.items():
            name = self._prefix + (f"engine {index}: " if len(states) > 1 else "")
            if not health.is_stalled:
                if index in self._reported:
                    logger.warning("%sthe stall is over: %s", name, health.reason or "the engine makes progress again")
                self._reported.discard(index)
            elif index not in self._reported:
                self._reported.add(index)
                logger.error("%s%s; the stacks of all processes follow", name, health.reason)
                await self._dump()

    async def _dump(self) -> None:
        for process in process_tree(os.getpid()):
            logger.error("pid %d (%s) %s", process.pid, process.name, _dump_status(process))
            process.request_dump()
            await asyncio.sleep(DUMP_TIME_S)


def _dump_status(process: ProcessInfo) -> str:
    if not process.handles_dump:
        return f"is in state {process.state}; it cannot dump its stacks"
    if process.is_stopped:
        return f"is stopped (state {process.state}); it dumps its stacks when it is continued"
    return f"is in state {process.state}; its threads:"
