"""`Siblings`: the HTTP processes beside this one, from their start to their end. Serves nobody itself.

Each is a frontend of its own with a connection to the core; this process, the first of them, is the parent of all. One
that dies takes its own callers' requests with it, which the core aborts, and is replaced.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from octavo.frontend.http.listener import Listener
from octavo.protocol.config import ServerConfig
from octavo.protocol.control import ServerReady, ServerSpec
from octavo.protocol.errors import OctavoError, StartupError
from octavo.protocol.log import log_settings
from octavo.protocol.supervise import Child, ChildExited

logger = logging.getLogger(__name__)

MODULE = "octavo.frontend.http.sibling"

MAX_DEATHS = 3
DEATHS_WINDOW_S = 60.0
"""When more than `MAX_DEATHS` of them die within so many seconds, the server ends: they would not stop to."""

RESTART_DELAY_S = 0.5
"""Long enough to hear that the engine has died, if that is why one of them has ended."""

READY_TIMEOUT_S = 60.0
"""What one gets to import the server, connect to the core and load the tokenizer."""

KILL_AFTER_S = 6.0
"""What they get beyond the patience with running requests until they are killed."""


class Siblings:
    """All further HTTP processes.

    Args:
        config: of the server.
        keys: the accepted API keys.
        address: of the core.
        board_path: the file with everybody's metrics.
        listener: with a socket for each.
        is_engine_dead: then those that end need no successor.
        on_failure: called with the reason when they cannot be kept alive.
        module: what they run, by name.
    """

    def __init__(
        self,
        config: ServerConfig,
        keys: list[str],
        address: str,
        board_path: Path,
        listener: Listener,
        is_engine_dead: Callable[[], bool],
        on_failure: Callable[[OctavoError], None],
        module: str = MODULE,
    ) -> None:
        self._config = msgspec.structs.replace(config, api_key=keys or None)
        self._address = address
        self._board_path = board_path
        self._listener = listener
        self._is_engine_dead = is_engine_dead
        self._on_failure = on_failure
        self._module = module
        self._tasks: list[asyncio.Task[None]] = []
        self._children: dict[int, Child] = {}
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS + 1)
        self._is_ending = False

    @property
    def pids(self) -> list[int]:
        """Process ids of those that run."""
        return [child.pid for child in self._children.values()]

    async def start(self) -> None:
        """Start them all and wait until they answer.

        Raises:
            StartupError: one of them cannot; holds the root cause.
        """
        rows = range(1, len(self._listener.sockets))
        for row in rows:
            self._spawn(row)
        try:
            for row in rows:
                await asyncio.wait_for(self._wait_until_ready(row), READY_TIMEOUT_S)
        except ChildExited as exited:
            raise exited.as_startup_error("starting an HTTP process") from None
        except TimeoutError:
            raise StartupError(
                f"an HTTP process was not ready within {READY_TIMEOUT_S:.0f} s", phase="starting an HTTP process"
            ) from None
        self._tasks = [asyncio.create_task(self._keep_alive(row), name=f"sibling {row}") for row in rows]

    def terminate(self) -> None:
        """Ask them to drain; the second time, to abort what still runs."""
        self._is_ending = True
        for child in self._children.values():
            child.terminate()

    async def wait(self, patience_s: float) -> None:
        """Wait until all have ended; kill those that have not `KILL_AFTER_S` after `patience_s`."""
        self._is_ending = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=patience_s + KILL_AFTER_S)
        await self.kill()

    async def kill(self) -> None:
        """End at once whatever still runs; harmless the second time."""
        self._is_ending = True
        for child in self._children.values():
            child.kill()
        if self._tasks:
            await asyncio.wait(self._tasks)  # each closes what it watches
        for child in self._children.values():  # of a start that failed: nobody watches them
            child.wait()
            child.close()
        self._children.clear()

    def _spawn(self, row: int) -> None:
        fd = self._listener.sockets[row].fileno()
        log_level, log_config = log_settings()
        spec = ServerSpec(
            config=self._config,
            address=self._address,
            listener_fd=fd,
            board_path=str(self._board_path),
            row=row,
            log_level=log_level,
            log_config=log_config,
        )
        self._children[row] = Child.spawn(self._module, spec, f"HTTP process {row}", inherited=[fd])

    async def _wait_until_ready(self, row: int) -> None:
        """Wait for the life sign that says so.

        Raises:
            ChildExited: it ended instead.
        """
        while not await self._receive(row, ServerReady):
            pass

    async def _keep_alive(self, row: int) -> None:
        """Replace a process whenever it dies, until this is the end of all or they die too often."""
        while True:
            try:
                await self._receive(row, None)
            except ChildExited as exited:
                self._children.pop(row).close()
                if not self._is_ending:
                    await asyncio.sleep(RESTART_DELAY_S)
                if self._is_ending or self._is_engine_dead():
                    return
                if self._has_died_too_often():
                    self._on_failure(OctavoError(f"{exited}, the last of {len(self._deaths)} in a short time"))
                    return
                logger.error("%s: its requests were aborted; starting another", exited)
                self._spawn(row)

    def _has_died_too_often(self) -> bool:
        self._deaths.append(time.monotonic())
        return len(self._deaths) > MAX_DEATHS and self._deaths[-1] - self._deaths[0] < DEATHS_WINDOW_S

    async def _receive(self, row: int, wanted: type[ServerReady] | None) -> bool:
        """Wait until a process says something; return whether it was what is wanted.

        Raises:
            ChildExited: it has ended.
        """
        child = self._children[row]
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(child.fileno(), readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(child.fileno())
        found = False
        while (message := child.receive(timeout_s=0)) is not None:
            found = found or (wanted is not None and isinstance(message, wanted))
        return found
