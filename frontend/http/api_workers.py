"""`ApiWorkers`: starts, supervises and stops the additional HTTP processes.

Each process is a complete frontend with its own connections to the engines. The parent process serves HTTP too. When a
process dies, the cores abort its requests and the parent replaces it.
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

MODULE = "octavo.frontend.http.api_worker"

MAX_DEATHS = 3
DEATHS_WINDOW_S = 60.0
"""The server gives up if more than `MAX_DEATHS` processes die within this many seconds."""

RESTART_DELAY_S = 0.5
"""Seconds before a restart: long enough to notice that the engine died, if that is why the process ended."""

READY_TIMEOUT_S = 60.0
"""Seconds that a process may take to import the server, connect to the core and load the tokenizer."""

KILL_AFTER_S = 6.0
"""Seconds between the end of the drain timeout and SIGKILL."""


class ApiWorkers:
    """The additional HTTP processes.

    Args:
        config: the server's configuration.
        keys: the accepted API keys.
        address: path of the socket on which this process publishes which engines exist.
        counters_path: the file with the shared metrics of all processes.
        listener: has one socket per process.
        is_engine_dead: returns whether the engine is dead; if so, processes that end are not replaced.
        on_failure: called with the reason when processes die too often.
        module: name of the module that the processes run.
    """

    def __init__(
        self,
        config: ServerConfig,
        keys: list[str],
        address: str,
        counters_path: Path,
        listener: Listener,
        is_engine_dead: Callable[[], bool],
        on_failure: Callable[[OctavoError], None],
        module: str = MODULE,
    ) -> None:
        self._config = msgspec.structs.replace(config, api_key=keys or None)
        self._address = address
        self._counters_path = counters_path
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
        """Process ids of the running processes."""
        return [child.pid for child in self._children.values()]

    async def start(self) -> None:
        """Start all processes and wait until they are ready.

        Raises:
            StartupError: a process failed to start; holds the root cause.
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
            raise StartupError(f"an HTTP process was not ready within {READY_TIMEOUT_S:.0f} s") from None
        self._tasks = [asyncio.create_task(self._keep_alive(row), name=f"api_worker {row}") for row in rows]

    def terminate(self) -> None:
        """Ask all processes to drain. The second call asks them to abort the remaining requests."""
        self._is_ending = True
        for child in self._children.values():
            child.terminate()

    async def wait(self, drain_timeout_s: float) -> None:
        """Wait until all processes have exited. Kill those still running `KILL_AFTER_S` after `drain_timeout_s`."""
        self._is_ending = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=drain_timeout_s + KILL_AFTER_S)
        await self.kill()

    async def kill(self) -> None:
        """Kill all remaining processes. Safe to call twice."""
        self._is_ending = True
        for child in self._children.values():
            child.kill()
        if self._tasks:
            await asyncio.wait(self._tasks)  # each task closes its own child
        for child in self._children.values():  # left over from a failed start: no task watches them
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
            counters_path=str(self._counters_path),
            row=row,
            log_level=log_level,
            log_config=log_config,
        )
        self._children[row] = Child.spawn(self._module, spec, f"HTTP process {row}", inherited=[fd], leads_group=True)

    async def _wait_until_ready(self, row: int) -> None:
        """Wait for `ServerReady` from a process.

        Raises:
            ChildExited: the process ended instead.
        """
        while not await self._receive(row, ServerReady):
            pass

    async def _keep_alive(self, row: int) -> None:
        """Replace the process whenever it dies, until shutdown or until processes die too often."""
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
                    self._on_failure(
                        OctavoError(f"{exited}: {len(self._deaths)} HTTP processes died within {DEATHS_WINDOW_S:.0f} s")
                    )
                    return
                logger.error("%s: its requests were aborted; starting a replacement", exited)
                self._spawn(row)

    def _has_died_too_often(self) -> bool:
        self._deaths.append(time.monotonic())
        return len(self._deaths) > MAX_DEATHS and self._deaths[-1] - self._deaths[0] < DEATHS_WINDOW_S

    async def _receive(self, row: int, wanted: type[ServerReady] | None) -> bool:
        """Wait for messages from a process; return True as soon as one is of the type `wanted`.

        Raises:
            ChildExited: the process has ended.
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
