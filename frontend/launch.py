"""Starts an engine as a child of this process, follows its start-up, and ends it.

Says nothing of requests: `frontend/client.py` talks to the engine once it is up.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from octavo.frontend.model_files import read_model_facts
from octavo.frontend.run_dir import RunDir
from octavo.protocol.config import EngineConfig, ResolvedConfig, resolve
from octavo.protocol.config.engine import DeviceName
from octavo.protocol.control import CoreReady, CoreSpec, PhaseDone, Progress
from octavo.protocol.env import Env
from octavo.protocol.supervise import Child, ChildExited

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 5.0
"""What a core gets to leave in good order after SIGTERM."""

ABORT_TIMEOUT_S = 2.0
"""What it gets after a second one, to end the requests of other applications and say so."""

ProgressCallback = Callable[[str, float | None], None]
"""Called with a phase and how far it has come (0 to 1, None if that cannot be told)."""


class Timeline:
    """Seconds each phase of the start-up took, in every process."""

    def __init__(self) -> None:
        self.phases: list[PhaseDone] = []
        self._start = time.monotonic()

    def add(self, process: str, phase: str, seconds: float) -> None:
        """Record a phase."""
        self.phases.append(PhaseDone(process, phase, seconds))

    def render(self) -> str:
        """Return the timeline as a small table, in order of completion."""
        total = time.monotonic() - self._start
        width = max((len(f"{done.process}: {done.phase}") for done in self.phases), default=0)
        rows = [f"  {f'{done.process}: {done.phase}':<{width}} {done.seconds:7.2f} s" for done in self.phases]
        return "\n".join([f"start-up took {total:.2f} s (processes start in parallel):", *rows])


class LaunchedEngine:
    """A core process of ours, ready to be connected to."""

    def __init__(self, config: ResolvedConfig, address: str, child: Child, run_dir: RunDir, timeline: Timeline) -> None:
        self.config = config
        self.address = address
        self.timeline = timeline
        self._child = child
        self._run_dir = run_dir
        self._on_exit: Callable[[str], None] | None = None
        self._exited = asyncio.Event()
        asyncio.get_running_loop().add_reader(child.fileno(), self._on_readable)

    @property
    def core_pid(self) -> int:
        """Process id of the core."""
        return self._child.pid

    def watch(self, on_exit: Callable[[str], None]) -> None:
        """Call `on_exit` with the root cause when the core ends by itself."""
        self._on_exit = on_exit

    def _on_readable(self) -> None:
        try:
            while self._child.receive(timeout_s=0) is not None:
                pass  # life signs after the start say nothing new
        except ChildExited as exited:
            asyncio.get_running_loop().remove_reader(self._child.fileno())
            self._exited.set()
            if self._on_exit:
                self._on_exit(str(exited))

    async def stop(self) -> None:
        """End the core and everything below it; harmless when it is gone already."""
        self._on_exit = None
        try:
            for timeout_s in (DRAIN_TIMEOUT_S, ABORT_TIMEOUT_S):
                if not self._exited.is_set():
                    self._child.terminate()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._exited.wait(), timeout_s)
        finally:  # a stop that is cancelled must not leave a core behind
            self._end()

    def _end(self) -> None:
        if self._child.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(self._child.fileno())
        self._child.kill()
        self._child.stop(timeout_s=0)
        self._exited.set()
        self._run_dir.remove()


async def launch_engine(
    config: EngineConfig, *, address: str | None = None, on_progress: ProgressCallback | None = None
) -> LaunchedEngine:
    """Start a core process and wait until it accepts connections.

    Args:
        config: what the user said.
        address: `ipc://` address for further applications; None: inside the private directory.
        on_progress: told what the engine is doing while it starts.

    Raises:
        StartupError: the root cause, whichever process it happened in.
    """
    env = Env.read()
    timeline = Timeline()
    start = time.monotonic()
    facts = await asyncio.to_thread(read_model_facts, config.model, env)
    resolved = resolve(config, facts, device=detect_device(), num_cores=len(os.sched_getaffinity(0)))
    timeline.add("Frontend", "reading model files", time.monotonic() - start)
    run_dir = RunDir(env.runtime_dir)
    address = address or f"ipc://{run_dir.path}/core"
    spec = CoreSpec(
        config=resolved,
        address=address,
        run_dir=str(run_dir.path),
        epoch=time.time_ns(),
        log_level=logging.getLevelName(logging.getLogger("octavo").getEffectiveLevel()),
        check_invariants=env.check_invariants,
    )
    child = None
    try:
        child = Child.spawn("octavo.core_proc", spec, "core")
        await _follow_start(child, timeline, on_progress or (lambda phase, fraction: None))
    except BaseException:
        if child:
            child.kill()
            child.stop(timeout_s=1.0)
        run_dir.remove()
        raise
    return LaunchedEngine(resolved, address, child, run_dir, timeline)


def detect_device() -> DeviceName:
    """Return what "auto" means on this machine: the CPU, until there is a GPU path."""
    if Path("/dev/nvidiactl").exists():
        logger.warning("a GPU is here, but this release computes on the CPU only")
    return "cpu"


async def _follow_start(child: Child, timeline: Timeline, on_progress: ProgressCallback) -> None:
    """Wait for `CoreReady`; the core's own time-outs bound every phase."""
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
                        return
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
