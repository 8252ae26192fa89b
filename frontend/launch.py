"""Follows a spawned engine until it is ready, watches it, starts it again, and ends it.

Says nothing of requests: `frontend/client.py` talks to the engine once it is up. When to start it again is decided in
`recovery/keeper.py`.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from octavo.frontend.spawn import SpawnedEngine, Timeline
from octavo.protocol.config import DeviceFacts, ResolvedConfig
from octavo.protocol.control import CoreReady, PhaseDone, Progress
from octavo.protocol.errors import StartupError
from octavo.protocol.pulse import Pulse
from octavo.protocol.supervise import Child, ChildExited

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 5.0
"""What a core gets to leave in good order after SIGTERM."""

ABORT_TIMEOUT_S = 2.0
"""What it gets after a second one, to end the requests of other applications and say so."""

MIN_RESTART_TIMEOUT_S = 120.0
RESTART_PATIENCE = 10.0
"""A core that is started again has this many times as long as the first one needed, and two minutes at least: one that
was stopped, or hangs, while it starts must not keep its successors waiting for ever."""

ProgressCallback = Callable[[str, float | None], None]
"""Called with a phase and how far it has come (0 to 1, None if that cannot be told)."""


class LaunchedEngine:
    """A core process of ours, ready to be connected to."""

    def __init__(self, spawned: SpawnedEngine, start_s: float) -> None:
        """Take over a core that is ready; its start took `start_s` seconds."""
        self._spawned = spawned
        self._restart_timeout_s = max(MIN_RESTART_TIMEOUT_S, RESTART_PATIENCE * start_s)
        self._on_exit: Callable[[ChildExited], None] | None = None
        self._successor: Child | None = None
        """A core that starts beside the present one."""
        self._exited = asyncio.Event()
        self._exit: ChildExited | None = None
        """How the core ended, where nobody watched."""
        self._changing = asyncio.Lock()
        self._listen()

    @property
    def _child(self) -> Child:
        return self._spawned.child

    @property
    def config(self) -> ResolvedConfig:
        """What it runs."""
        return self._spawned.config

    @property
    def address(self) -> str:
        """Where to connect."""
        return self._spawned.address

    @property
    def timeline(self) -> Timeline:
        """How long each phase of the start took."""
        return self._spawned.timeline

    @property
    def core_pid(self) -> int:
        """Process id of the core."""
        return self._child.pid

    def watch(self, on_exit: Callable[[ChildExited], None]) -> None:
        """Call `on_exit` with how it ended when the core ends by itself, or has done so already."""
        self._on_exit = on_exit
        if self._exit:
            asyncio.get_running_loop().call_soon(on_exit, self._exit)

    def kill(self) -> None:
        """End the core at once, which is then noticed like any other death."""
        self._child.kill()

    def read_pulse(self) -> Pulse | None:
        """Return what the latest core said of itself, also after its death; None: nothing."""
        return self._spawned.read_pulse()

    async def restart(self, cause: str, on_progress: ProgressCallback | None = None) -> None:
        """Start another core with the same configuration at the same address, and wait until it is ready.

        Args:
            cause: how the one before has ended.
            on_progress: told what the engine is doing while it starts.

        Raises:
            StartupError: it cannot start, or does not in time; the root cause.
        """
        async with self._changing:
            if not self._exited.is_set():
                return  # another core has taken over meanwhile
            self._stop_listening()
            timeline = Timeline()
            with _spawning():
                self._spawned.respawn(cause)
            try:
                async with asyncio.timeout(self._restart_timeout_s):
                    self._spawned.note_ready(await _follow(self._child, timeline, on_progress or _ignore_progress))
            except TimeoutError:
                message = f"the core was not ready after {self._restart_timeout_s:.0f} s"
                raise StartupError(message, phase="starting the core again") from None
            logger.debug("%s", timeline.render())
            self._exited.clear()
            self._listen()

    async def replace(self, config: ResolvedConfig, on_progress: ProgressCallback | None = None) -> None:
        """Start a core with another configuration beside the present one; as soon as it is ready it takes over.

        Raises:
            StartupError: it cannot start (the root cause), and the engine is as before; or the engine listens on
                another machine's behalf too, where two cores cannot share the address.
        """
        if self._spawned.remote_address:
            message = f"an engine that listens on {self._spawned.remote_address} cannot be replaced while it runs"
            raise StartupError(message, phase="configuration", hint="stop it, and start another")
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

    def _listen(self) -> None:
        asyncio.get_running_loop().add_reader(self._child.fileno(), self._on_readable)

    def _stop_listening(self) -> None:
        if self._child.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._child.fileno())

    def _on_readable(self) -> None:
        try:
            while self._child.receive(timeout_s=0) is not None:
                pass  # life signs after the start say nothing new
        except ChildExited as exited:
            self._stop_listening()
            self._exited.set()
            if self._on_exit:
                self._on_exit(exited)
            else:
                self._exit = exited

    async def drain(self) -> ChildExited | None:
        """Let the core finish what it has accepted, from anybody, and take nothing new.

        Returns how it ended, None if there was none. Waits until: it has ended, which `stop` makes it do sooner.
        """
        self._on_exit = None  # its end is no reason for another
        if self._exited.is_set():
            return None
        self._child.terminate()
        await self._exited.wait()
        return self._exit

    async def stop(self) -> None:
        """End the core and everything below it; harmless when it is gone already."""
        self._on_exit = None
        if self._successor:
            self._successor.kill()  # whoever follows it cleans up
        try:
            for timeout_s in (DRAIN_TIMEOUT_S, ABORT_TIMEOUT_S):
                if not self._exited.is_set():
                    self._child.terminate()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._exited.wait(), timeout_s)
        finally:  # a stop that is cancelled must not leave a core behind
            self._end()

    def _end(self) -> None:
        self._stop_listening()
        self._spawned.end()
        self._exited.set()


async def follow_start(spawned: SpawnedEngine, on_progress: ProgressCallback | None = None) -> LaunchedEngine:
    """Wait until a spawned core accepts connections; one that does not is ended.

    Args:
        spawned: by this thread.
        on_progress: told what the engine is doing while it starts.

    Raises:
        StartupError: the root cause, whichever process it happened in.
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
    """Tell of what the system refuses as of any other start that fails."""
    try:
        yield
    except OSError as error:
        raise StartupError(f"a core cannot be started: {error}", phase="starting the core") from error


def _ignore_progress(phase: str, fraction: float | None) -> None:
    """Tell nobody."""


async def _follow(child: Child, timeline: Timeline, on_progress: ProgressCallback) -> list[DeviceFacts]:
    """Wait for `CoreReady` and return what its workers have measured; the core's own time-outs bound every phase."""
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
