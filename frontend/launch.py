"""Waits for a spawned engine to become ready, watches it, restarts it and stops it.

Requests are not handled here: `frontend/client.py` sends them once the engine is up. `recovery/engine_supervisor.py`
decides when to restart.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from octavo.frontend.spawn import SpawnedEngine
from octavo.frontend.timeline import Timeline
from octavo.protocol.config import DeviceFacts, ResolvedConfig
from octavo.protocol.control import CoreReady, PhaseDone, Progress
from octavo.protocol.errors import StartupError
from octavo.protocol.pulse import Pulse
from octavo.protocol.supervise import Child, ChildExited

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 5.0
"""Seconds that a core gets for an orderly exit after SIGTERM."""

ABORT_TIMEOUT_S = 2.0
"""Seconds that a core gets after a second SIGTERM, to abort the requests of other applications and notify them."""

MIN_RESTART_TIMEOUT_S = 120.0
RESTART_PATIENCE = 10.0
"""A restarted core must be ready within this multiple of the first start's duration, or within two minutes if longer.
Without a limit, a core that hangs or was suspended during its start would block every later restart."""

ProgressCallback = Callable[[str, float | None], None]
"""Called with a phase and its progress (0 to 1, None if unknown)."""


class LaunchedEngine:
    """A core process that we started and that accepts connections."""

    def __init__(self, spawned: SpawnedEngine, start_s: float) -> None:
        """Take ownership of a ready core; `start_s` is the number of seconds that its start took."""
        self._spawned = spawned
        self._restart_timeout_s = max(MIN_RESTART_TIMEOUT_S, RESTART_PATIENCE * start_s)
        self._on_exit: Callable[[ChildExited], None] | None = None
        self._successor: Child | None = None
        """A core that is starting while the current one still runs."""
        self._exited = asyncio.Event()
        self._exit: ChildExited | None = None
        """How the core ended, if it ended before `watch` was called."""
        self._changing = asyncio.Lock()
        self._listen()

    @property
    def _child(self) -> Child:
        return self._spawned.child

    @property
    def config(self) -> ResolvedConfig:
        """The configuration of the core."""
        return self._spawned.config

    @property
    def address(self) -> str:
        """The address to connect to."""
        return self._spawned.address

    @property
    def timeline(self) -> Timeline:
        """Duration of each phase of the start."""
        return self._spawned.timeline

    @property
    def core_pid(self) -> int:
        """Process id of the core."""
        return self._child.pid

    def watch(self, on_exit: Callable[[ChildExited], None]) -> None:
        """Call `on_exit` when the core exits by itself; if it already has, call it soon."""
        self._on_exit = on_exit
        if self._exit:
            asyncio.get_running_loop().call_soon(on_exit, self._exit)

    def kill(self) -> None:
        """Kill the core; `on_exit` is called as for any other death."""
        self._child.kill()

    def read_pulse(self) -> Pulse | None:
        """Return the latest core's pulse, even after the core's death. `None` if the core wrote none."""
        return self._spawned.read_pulse()

    async def restart(self, cause: str, on_progress: ProgressCallback | None = None) -> None:
        """Start a new core with the same configuration and address, and wait until it is ready.

        Args:
            cause: how the previous core ended, for the log.
            on_progress: called with the engine's progress while it starts.

        Raises:
            StartupError: the core failed to start or timed out. The error names the root cause.
        """
        async with self._changing:
            if not self._exited.is_set():
                return  # another call has restarted the core meanwhile
            self._stop_listening()
            timeline = Timeline()
            with _spawning():
                self._spawned.respawn(cause)
            try:
                async with asyncio.timeout(self._restart_timeout_s):
                    self._spawned.note_ready(await _follow(self._child, timeline, on_progress or _ignore_progress))
            except TimeoutError:
                message = f"the core was not ready after {self._restart_timeout_s:.0f} s"
                raise StartupError(message) from None
            logger.debug("%s", timeline.render())
            self._exited.clear()
            self._listen()

    def require_replaceable(self, config: ResolvedConfig) -> None:
        """Check that an engine of another configuration can replace this one while it runs.

        Raises:
            StartupError: it cannot; the error says why.
        """
        if self._spawned.remote_address:
            message = f"an engine that listens on {self._spawned.remote_address} cannot be replaced while it runs"
            raise StartupError(message, hint="stop it, and start another")
        if config.is_lock_step or self.config.is_lock_step:
            message = "engines that divide the experts (--enable-expert-parallel) cannot be replaced while they run"
            raise StartupError(message, hint="stop them, and start others")
        if config.num_nodes > 1 or config.executor == "ray":
            message = "an engine on several machines cannot be replaced while it runs: it has their memory"
            raise StartupError(message, hint="stop it, and start another")

    async def replace(self, config: ResolvedConfig, on_progress: ProgressCallback | None = None) -> None:
        """Start a core with another configuration while the current one runs; switch over once it is ready.

        Raises:
            StartupError: the new core failed to start, and the engine is unchanged; or the engine listens on a TCP
                address, which two cores cannot share.
        """
        self.require_replaceable(config)
        async with self._changing:
            with _spawning():
                successor = self._successor = self._spawned.spawn_successor(config)
            try:
                facts = await _follow(successor, Timeline(), on_progress or _ignore_progress)
                with _spawning():
                    self._spawned.redirect()
            except BaseException:
                successor.kill()
                successor.stop(timeout_s=0)
                raise
            finally:
                self._successor = None
            self._stop_listening()
            self._spawned.hand_over(successor, config, facts)
            self._exited.clear()
            self._listen()

    @property
    def is_running(self) -> bool:
        """Whether a core runs: `False` from the end of a core until the next one is ready."""
        return not self._exited.is_set()

    @property
    def has_heir(self) -> bool:
        """Whether another engine has taken over the addresses (`hand_over_addresses`)."""
        return self._spawned.has_heir

    def hand_over_addresses(self, heir: "LaunchedEngine") -> None:
        """Point all addresses of this engine at another one, where applications reconnect after they lost this core.

        Raises:
            OSError: a symlink could not be replaced.
        """
        self._spawned.hand_over_addresses(heir._spawned)

    def _listen(self) -> None:
        asyncio.get_running_loop().add_reader(self._child.fileno(), self._on_readable)

    def _stop_listening(self) -> None:
        if self._child.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._child.fileno())

    def _on_readable(self) -> None:
        try:
            while self._child.receive(timeout_s=0) is not None:
                pass  # control messages after the start need no handling
        except ChildExited as exited:
            self._stop_listening()
            self._exited.set()
            if self._on_exit:
                self._on_exit(exited)
            else:
                self._exit = exited

    async def drain(self) -> ChildExited | None:
        """Let the core finish all accepted requests of every client, and accept no new ones.

        Returns how the core ended, or `None` if no core was running. Waits until the core has exited; `stop` hastens
        that.
        """
        self._on_exit = None  # this exit must not cause a restart
        if self._exited.is_set():
            return None
        self._child.terminate()
        await self._exited.wait()
        return self._exit

    async def stop(self) -> None:
        """Stop the core and all its child processes. Safe to call when it has already exited."""
        self._on_exit = None
        if self._successor:
            self._successor.kill()  # `replace`, which waits for it, cleans up
        if self._spawned.has_heir:  # an orderly exit would tell applications that the engine is gone for good
            self._end()
            return
        try:
            for timeout_s in (DRAIN_TIMEOUT_S, ABORT_TIMEOUT_S):
                if not self._exited.is_set():
                    self._child.terminate()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._exited.wait(), timeout_s)
        finally:  # a cancelled `stop` must not leave a core behind
            self._end()

    def _end(self) -> None:
        self._stop_listening()
        self._spawned.end()
        self._exited.set()


async def follow_start(spawned: SpawnedEngine, on_progress: ProgressCallback | None = None) -> LaunchedEngine:
    """Wait until a spawned core accepts connections; stop the core if its start fails.

    Args:
        spawned: the engine, spawned by the calling thread.
        on_progress: called with the engine's progress while it starts.

    Raises:
        StartupError: the start failed. The error names the root cause, from whichever process failed.
    """
    start = time.monotonic()
    try:
        spawned.note_ready(await _follow(spawned.child, spawned.timeline, on_progress or _ignore_progress))
    except BaseException:
        spawned.end()
        raise
    return LaunchedEngine(spawned, time.monotonic() - start)


@contextlib.contextmanager
def _spawning() -> Iterator[None]:
    """Convert an `OSError` while spawning to a `StartupError`."""
    try:
        yield
    except OSError as error:
        raise StartupError(f"cannot start a core process: {error}") from error


def _ignore_progress(phase: str, fraction: float | None) -> None:
    """Ignore the progress of a start that nobody watches."""


async def _follow(child: Child, timeline: Timeline, on_progress: ProgressCallback) -> list[DeviceFacts]:
    """Wait for `CoreReady` and return its device facts. The core itself enforces a timeout per phase."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(child.fileno(), readable.set)
    phase = "starting"
    try:
        while True:
            await readable.wait()
            readable.clear()
            while (message := child.receive(timeout_s=0)) is not None:
                match message:
                    case CoreReady():
                        return message.facts
                    case Progress():
                        phase = message.phase
                        on_progress(message.phase, message.fraction)
                    case PhaseDone():
                        timeline.add(message.process, message.phase, message.seconds)
                        logger.debug("%s: %s took %.2f s", message.process, message.phase, message.seconds)
    except ChildExited as exited:
        raise exited.as_startup_error(phase) from None
    finally:
        loop.remove_reader(child.fileno())
