"""Spawns a core process, before anything heavy is imported: the core imports while its parent does.

Does not wait for it: that is `launch.py`.
"""

import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from octavo.frontend.device import detect_device
from octavo.frontend.model_files.facts import read_model_facts
from octavo.frontend.run_dir import RunDir
from octavo.protocol.channel import ipc_path, is_listening
from octavo.protocol.config import DeviceFacts, EngineConfig, ResolvedConfig, resolve
from octavo.protocol.control import CoreSpec, PhaseDone
from octavo.protocol.cores import num_usable_cores
from octavo.protocol.curve import check_remote, read_keys_of_engine
from octavo.protocol.env import Env
from octavo.protocol.log import log_settings
from octavo.protocol.pulse import Pulse, PulseReader
from octavo.protocol.supervise import Child

logger = logging.getLogger(__name__)


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


class SpawnedEngine:
    """A core process of ours on its way, those that follow it, and all that must go with the last of them.

    Everything is to be called by one thread: a core ends with the thread that spawned it.
    """

    def __init__(self, config: ResolvedConfig, address: str | None, run_dir: RunDir, timeline: Timeline) -> None:
        is_remote = address is not None and address.startswith("tcp://")
        self.config = config
        # Also of an engine that others join by tcp: its own processes need no keys.
        self.address = f"ipc://{run_dir.path}/core" if is_remote or address is None else address
        self.remote_address = address if is_remote and address else ""
        self.timeline = timeline
        self._run_dir = run_dir
        self._epoch = time.time_ns()
        """A life has this and its own number."""
        self._num_lives = 0
        self._present_life = 1
        self._ready_life = 0
        """The latest that was ready; 0: none was."""
        self._oldest_life = 1
        """Of those whose directories are left."""
        self._facts: list[DeviceFacts] = []
        """What workers of this configuration have measured: those of later cores need not, and get the same cache."""
        self.child = self._spawn(config, self.address)

    @property
    def run_dir(self) -> Path:
        """Private directory of the engine, which is removed with it."""
        return self._run_dir.path

    def note_ready(self, facts: list[DeviceFacts]) -> None:
        """The present core is ready; what those before it have left is removed: there may be many.

        Args:
            facts: what its workers have measured.
        """
        self._facts = facts
        self._ready_life = self._present_life
        for life in range(self._oldest_life, self._present_life):
            shutil.rmtree(self._life_dir(life), ignore_errors=True)
        self._oldest_life = self._present_life

    def read_pulse(self) -> Pulse | None:
        """Return what the latest core that was ready has said of itself, also after its death; None: nothing."""
        try:
            reader = PulseReader(self._life_dir(self._ready_life) / "pulse")
        except FileNotFoundError:
            return None
        try:
            return reader.read()
        finally:
            reader.close()

    def respawn(self, cause: str) -> None:
        """Start another core with the same configuration at the same address, for the next epoch.

        The one before is killed, if it still runs.

        Args:
            cause: how it has ended.
        """
        _end_child(self.child)
        predecessor_dir = str(self._life_dir(self._ready_life)) if self._ready_life else ""
        self.child = self._spawn(
            self.config, self.address, self._facts, predecessor_dir=predecessor_dir, predecessor_end=cause
        )
        self._present_life = self._num_lives

    def spawn_successor(self, config: ResolvedConfig) -> Child:
        """Start a core with another configuration beside the present one, at an address of its own.

        Whoever calls this gives it to `hand_over`, or ends it.
        """
        address = f"ipc://{self._life_dir(self._num_lives + 1)}/core"
        return self._spawn(config, address, replaced_epoch=self._epoch + self._present_life)

    def redirect(self) -> None:
        """Let the engine's address lead to the core that was spawned last, which is ready.

        At no moment does it lead nowhere.

        Raises:
            OSError: it cannot, and leads where it did.
        """
        path = ipc_path(self.address)
        assert path is not None, "the engine's own processes use no other transport"
        pointer = path.with_name(path.name + ".new")
        pointer.unlink(missing_ok=True)
        pointer.symlink_to(self._life_dir(self._num_lives) / "core")
        pointer.replace(path)

    def hand_over(self, successor: Child, config: ResolvedConfig, facts: list[DeviceFacts]) -> None:
        """Take a successor that has the engine's address, and kill the core before it.

        Those who were connected to that one notice the loss and connect again.
        """
        _end_child(self.child)
        self.child, self.config = successor, config
        self._present_life = self._num_lives
        self.note_ready(facts)

    def end(self) -> None:
        """Kill the core, if it still runs, and remove what it leaves behind; harmless the second time."""
        _end_child(self.child)
        if path := ipc_path(self.address):
            remove_socket(path)
        self._run_dir.remove()

    def _life_dir(self, life: int) -> Path:
        return self._run_dir.path / str(life)

    def _spawn(
        self,
        config: ResolvedConfig,
        address: str,
        facts: Sequence[DeviceFacts] = (),
        *,
        replaced_epoch: int = 0,
        predecessor_dir: str = "",
        predecessor_end: str = "",
    ) -> Child:
        self._num_lives += 1
        # Of its own for each life: what an earlier one has left, or still has open, is in nobody's way.
        life_dir = self._life_dir(self._num_lives)
        life_dir.mkdir(mode=0o700)
        if config.record_steps and self._num_lives > 1:  # the recording of a life before is worth keeping
            config = msgspec.structs.replace(config, record_steps=f"{config.record_steps}.{self._num_lives}")
        log_level, log_config = log_settings()
        spec = CoreSpec(
            config=config,
            address=address,
            run_dir=str(life_dir),
            epoch=self._epoch + self._num_lives,
            facts=list(facts),
            remote_address=self.remote_address,
            replaced_epoch=replaced_epoch,
            predecessor_dir=predecessor_dir,
            predecessor_end=predecessor_end,
            log_level=log_level,
            log_config=log_config,
            check_invariants=Env.read().check_invariants,
        )
        return Child.spawn("octavo.core_proc", spec, "core")


def remove_socket(path: Path) -> None:
    """Remove what a core that has ended left at its address, but nothing that another engine listens on."""
    if (path.is_symlink() or path.is_socket()) and not is_listening(path):
        path.unlink(missing_ok=True)


def _end_child(child: Child) -> None:
    if child.fileno() >= 0:
        child.kill()
        child.stop(timeout_s=0)


def read_config(config: EngineConfig, timeline: Timeline) -> ResolvedConfig:
    """Resolve what the user said with what the model's files say.

    Blocks until: a download or a conversion, should one be needed, has finished.

    Raises:
        ConfigError: a setting or a file is wrong.
    """
    start = time.monotonic()
    env = Env.read()
    facts = read_model_facts(config.model, env)
    device = detect_device(hides_gpus=env.hides_gpus)
    resolved = resolve(config, facts, device=device, num_cores=num_usable_cores())
    timeline.add("Frontend", "reading model files", time.monotonic() - start)
    return resolved


def spawn_engine(config: ResolvedConfig, timeline: Timeline, address: str | None = None) -> SpawnedEngine:
    """Start a core process, which ends with the calling thread at the latest.

    Args:
        config: what it runs.
        timeline: of the start.
        address: `ipc://` or `tcp://` address for further applications; None: inside the private directory.

    Raises:
        ConfigError: other machines could reach the address, and there are no keys; or these cannot be read.
    """
    if address and address.startswith("tcp://"):
        check_remote(address, config.engine_secret_key_file is not None)
        read_keys_of_engine(config)
    run_dir = RunDir(Env.read().runtime_dir)
    try:
        return SpawnedEngine(config, address, run_dir, timeline)
    except BaseException:
        run_dir.remove()
        raise
