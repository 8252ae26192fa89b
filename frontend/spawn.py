"""Spawns the core process before the parent's heavy imports, so that both processes import in parallel.

`launch.py` waits for the core to become ready.
"""

import contextlib
import logging
import os
import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from octavo.frontend.engine_configs import addresses_of_engines, configs_of_engines
from octavo.frontend.fork_server import fork_server
from octavo.frontend.run_dir import RunDir
from octavo.frontend.timeline import Timeline
from octavo.protocol.channel import ipc_path, is_listening
from octavo.protocol.config import DeviceFacts, ResolvedConfig
from octavo.protocol.control import CoreSpec
from octavo.protocol.curve import check_remote, read_keys_of_engine
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError
from octavo.protocol.log import log_settings
from octavo.protocol.pulse import Pulse, PulseReader
from octavo.protocol.supervise import Child

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")

END_TIMEOUT_S = 1.0
"""Seconds that a core gets to stop its workers when its start is abandoned."""

MAX_WAITING_ENGINES = 256
"""Listen backlog at a starting core: one connection per engine, and connections that engines have abandoned
meanwhile."""


class SpawnedEngine:
    """The current core process, its successors, and the files to remove after the last one.

    Call all methods from one thread: a core is killed when the thread that spawned it ends.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        address: str | None,
        run_dir: RunDir,
        timeline: Timeline,
        lock_step_path: str = "",
    ) -> None:
        is_remote = address is not None and address.startswith("tcp://")
        self.config = config
        # Local processes use the ipc address, which needs no keys, even if other machines join by tcp.
        self.address = f"ipc://{run_dir.path}/core" if is_remote or address is None else address
        self.remote_address = address if is_remote and address else ""
        self.timeline = timeline
        self._run_dir = run_dir
        self._weights_dir = RunDir(SHARED_MEMORY) if os.access(SHARED_MEMORY, os.W_OK) else None
        """Directory for weights that clients send. A new core of this engine finds them there."""
        self._epoch = time.time_ns()
        """The epoch of a core is this number plus the core's life number. A life is one run of a core process."""
        self._num_lives = 0
        self._current_life = 1
        self._ready_life = 0
        """The latest life that became ready. 0: none."""
        self._oldest_life = 1
        """The oldest life whose directory still exists."""
        self.has_heir = False
        """Whether another engine has taken over the addresses (`hand_over_addresses`)."""
        self._inherited_paths: list[Path] = []
        """Addresses, as paths, of the engines that this one has replaced; they lead to this engine."""
        self._inherited_dirs: list[RunDir] = []
        """Directories of the replaced engines."""
        self._facts: list[DeviceFacts] = []
        """Measured by the workers of this configuration. Later cores reuse the facts and so get a cache of the
        same size."""
        self.lock_step_path = lock_step_path
        """Socket of the first of the engines that divide the experts, where the others meet it. Empty if they do
        not."""
        self._lock_step: socket.socket | None = None
        """Listening socket that outlives the core, so that the other engines can wait there for the next core."""
        if config.is_lock_step and not lock_step_path:
            self.lock_step_path = f"{run_dir.path}/lock-step"
            self._lock_step = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._lock_step.bind(self.lock_step_path)
            self._lock_step.listen(MAX_WAITING_ENGINES)
        with contextlib.ExitStack() as unless_spawned:
            unless_spawned.callback(self._weights_dir.remove if self._weights_dir else lambda: None)
            self.child = self._spawn(config, self.address)
            unless_spawned.pop_all()

    @property
    def run_dir(self) -> Path:
        """The engine's private directory, removed by `end`."""
        return self._run_dir.path

    def note_ready(self, facts: list[DeviceFacts]) -> None:
        """Record that the current core is ready, and remove the directories of earlier lives.

        Args:
            facts: measured by the core's workers.
        """
        self._facts = facts
        self._ready_life = self._current_life
        for life in range(self._oldest_life, self._current_life):
            shutil.rmtree(self._life_dir(life), ignore_errors=True)
        self._oldest_life = self._current_life

    def read_pulse(self) -> Pulse | None:
        """Return the pulse of the latest core that became ready, even after its death. `None` if there is none."""
        try:
            reader = PulseReader(self._life_dir(self._ready_life) / "pulse")
        except FileNotFoundError:
            return None
        try:
            return reader.read()
        finally:
            reader.close()

    def respawn(self, cause: str) -> None:
        """Start a new core with the same configuration and address, in the next epoch.

        The previous core is killed if it still runs.

        Args:
            cause: how the previous core ended.
        """
        _end_child(self.child)
        predecessor_dir = str(self._life_dir(self._ready_life)) if self._ready_life else ""
        self.child = self._spawn(
            self.config, self.address, self._facts, predecessor_dir=predecessor_dir, predecessor_end=cause
        )
        self._current_life = self._num_lives

    def spawn_successor(self, config: ResolvedConfig) -> Child:
        """Start a core with another configuration, at its own address, while the current one runs.

        The caller must pass the result to `hand_over` or stop it.
        """
        address = f"ipc://{self._life_dir(self._num_lives + 1)}/core"
        return self._spawn(config, address, replaced_epoch=self._epoch + self._current_life)

    def redirect(self) -> None:
        """Atomically point the engine's address to the latest spawned core, which is ready.

        Raises:
            OSError: the symlink could not be replaced; the address is unchanged.
        """
        path = ipc_path(self.address)
        assert path is not None, "the engine's own processes use no other transport"
        _point(path, self._life_dir(self._num_lives) / "core")

    def hand_over_addresses(self, heir: "SpawnedEngine") -> None:
        """Point all addresses of this engine at another one, where applications reconnect after they lost this core.

        The heir removes the addresses in the end, along with our directory. A core that is started here later gets
        another address.

        Raises:
            OSError: a symlink could not be replaced.
        """
        own, target = ipc_path(self.address), ipc_path(heir.address)
        assert own is not None and target is not None, "the engine's own processes use no other transport"
        paths = [own, *self._inherited_paths]
        for path in paths:
            _point(path, target)
        heir._inherited_paths += paths
        heir._inherited_dirs += [self._run_dir, *self._inherited_dirs]
        self._inherited_paths, self._inherited_dirs = [], []
        self.has_heir = True
        self.address = f"ipc://{self.run_dir}/core.replaced"

    def hand_over(self, successor: Child, config: ResolvedConfig, facts: list[DeviceFacts]) -> None:
        """Make a successor the current core and kill the previous one.

        Clients of the previous core notice the disconnect and reconnect.
        """
        _end_child(self.child)
        self.child, self.config = successor, config
        self._current_life = self._num_lives
        self.note_ready(facts)

    def end(self) -> None:
        """Stop the core if it still runs, and remove its files. Idempotent.

        The core gets a moment to stop its own processes; the kernel kills those that remain.
        """
        _end_child(self.child, END_TIMEOUT_S)
        if self._weights_dir:
            self._weights_dir.remove()
        if self._lock_step:
            self._lock_step.close()
        if self.has_heir:
            for life in range(1, self._num_lives + 1):
                shutil.rmtree(self._life_dir(life), ignore_errors=True)
            return
        for run_dir in [self._run_dir, *self._inherited_dirs]:
            run_dir.remove()
        for path in [ipc_path(self.address), *self._inherited_paths]:
            if path:
                remove_socket(path)

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
        # One directory per life, so that files of an earlier core cannot conflict.
        life_dir = self._life_dir(self._num_lives)
        life_dir.mkdir(mode=0o700)
        if config.record_steps and self._num_lives > 1:  # do not overwrite the recording of an earlier life
            config = msgspec.structs.replace(config, record_steps=f"{config.record_steps}.{self._num_lives}")
        log_level, log_config = log_settings()
        lock_step_fd = self._lock_step.fileno() if self._lock_step else -1
        with fork_server.connect() if config.forks_workers else contextlib.nullcontext() as forks:
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
                weights_dir=str(self._weights_dir.path) if self._weights_dir else "",
                lock_step_path=self.lock_step_path,
                lock_step_fd=lock_step_fd,
                fork_server_fd=forks.fileno() if forks else -1,
                log_level=log_level,
                log_config=log_config,
                check_invariants=Env.read().check_invariants,
            )
            inherited = [descriptor for descriptor in (lock_step_fd, spec.fork_server_fd) if descriptor >= 0]
            return Child.spawn("octavo.core_proc", spec, "core", inherited=inherited, leads_group=True)


def _point(path: Path, target: Path) -> None:
    """Atomically make a path a symlink to another."""
    pointer = path.with_name(path.name + ".new")
    pointer.unlink(missing_ok=True)
    pointer.symlink_to(target)
    pointer.replace(path)


def remove_socket(path: Path) -> None:
    """Remove the socket of a core that has exited, unless another engine listens on it."""
    if (path.is_symlink() or path.is_socket()) and not is_listening(path):
        path.unlink(missing_ok=True)


def _end_child(child: Child, timeout_s: float = 0.0) -> None:
    if child.fileno() >= 0:
        if not timeout_s:  # the core must not begin to drain and notify its clients
            child.kill()
        child.stop(timeout_s)


def spawn_engines(config: ResolvedConfig, timeline: Timeline, address: str | None = None) -> list[SpawnedEngine]:
    """Start the core processes of all engines; see `spawn_engine` and `addresses_of_engines`.

    Raises:
        ConfigError: as `spawn_engine`.
    """
    engines: list[SpawnedEngine] = []
    configs = configs_of_engines(config)
    addresses = addresses_of_engines(address, len(configs)) if address else [None] * len(configs)
    try:
        for own, own_address in zip(configs, addresses, strict=True):
            lock_step_path = engines[0].lock_step_path if engines else ""
            engines.append(spawn_engine(own, timeline, own_address, lock_step_path))
    except BaseException:
        for engine in engines:
            engine.end()
        raise
    return engines


def spawn_engine(
    config: ResolvedConfig, timeline: Timeline, address: str | None = None, lock_step_path: str = ""
) -> SpawnedEngine:
    """Start a core process. It is killed when the calling thread ends.

    Args:
        config: configuration of the core.
        timeline: receives the phases of the start.
        address: `ipc://` or `tcp://` address for other applications. `None`: inside the private directory.
        lock_step_path: socket of the first of the engines that divide the experts. Empty: they do not, or this is the
            first one.

    Raises:
        ConfigError: the address is reachable from other machines and there are no keys; the keys cannot be read; or a
            logits processor was passed as code.
    """
    if address and address.startswith("tcp://"):
        check_remote(address, config.remote.engine_secret_key_file is not None)
        if any(source.code for source in config.logits_processors):
            raise ConfigError(
                f"logits processors passed as code need a local engine, and {address} is reachable from others",
                hint="pass them as module:Class, or use an ipc:// address",
            )
        read_keys_of_engine(config)
    run_dir = RunDir(Env.read().runtime_dir)
    try:
        return SpawnedEngine(config, address, run_dir, timeline, lock_step_path)
    except BaseException:
        run_dir.remove()
        raise
