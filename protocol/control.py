"""Parent and child at start-up: the launch spec down, the life signs up.

The spec travels through the child's standard input, which then stays open: its end of file means
that the parent is gone. Life signs travel through a second pipe, whose end of file means that the
child is gone. Each message is a 4-byte little-endian length and a msgpack body.
"""

import msgspec

from octavo.protocol import PROTOCOL_VERSION
from octavo.protocol.config import CachePlan, DeviceFacts, ResolvedConfig, ServerConfig


class CoreSpec(msgspec.Struct, frozen=True, kw_only=True, tag="core"):
    """Everything a core process is told when it starts."""

    config: ResolvedConfig
    address: str
    """Where to bind the frontends' ROUTER socket: `ipc://...`."""
    run_dir: str
    """Private directory of this engine, for the workers' sockets and the pulse file."""
    epoch: int
    replaced_epoch: int = 0
    """Of the core that will be ended in order that this one takes over; 0: none."""
    remote_address: str = ""
    """A `tcp://` address for frontends of other machines; "": none."""
    facts: list[DeviceFacts] = []
    """What the workers of an earlier core of this configuration have measured; []: they measure."""
    predecessor_dir: str = ""
    """The `run_dir` of the core that has died and whose requests this one will be asked for; "": there is none."""
    predecessor_end: str = ""
    """How that one died, in words."""
    log_level: str = "INFO"
    log_config: str = ""
    """See `configure_logging`."""
    check_invariants: bool = False
    version: int = PROTOCOL_VERSION


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True, tag="worker"):
    """Everything a worker process is told when it starts."""

    config: ResolvedConfig
    rank: int
    world_size: int
    plan_address: str
    """XPUB socket of the core, to subscribe to."""
    result_address: str
    """PULL socket of the core, to push to."""
    facts: DeviceFacts | None = None
    """What an earlier worker of this rank has measured, which need not be measured again; None: measure."""
    log_level: str = "INFO"
    log_config: str = ""
    """See `configure_logging`."""
    version: int = PROTOCOL_VERSION


class ServerSpec(msgspec.Struct, frozen=True, kw_only=True, tag="server"):
    """Everything a further HTTP process (`--api-server-count`) is told when it starts."""

    config: ServerConfig
    """With the API keys in it, wherever they came from."""
    address: str
    """Where the core listens for frontends."""
    listener_fd: int
    """The socket to accept callers from, inherited."""
    board_path: str
    """The file with the metrics of all HTTP processes."""
    row: int
    """This process's own row in it, from 1: the first process has 0."""
    log_level: str = "INFO"
    log_config: str = ""
    """See `configure_logging`."""
    version: int = PROTOCOL_VERSION


LaunchSpec = CoreSpec | WorkerSpec | ServerSpec


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The child is up, its signal handlers and its parent watch stand."""

    pid: int
    version: int = PROTOCOL_VERSION


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The child has entered a phase of its start-up, or has come further in it."""

    phase: str
    fraction: float | None = None
    """0 to 1 where it can be told."""


class PhaseDone(msgspec.Struct, frozen=True, tag="phase_done"):
    """A phase of the start-up took this long; the timeline in the log is made of these."""

    process: str
    phase: str
    seconds: float


class WorkerReady(msgspec.Struct, frozen=True, tag="worker_ready"):
    """The worker has loaded its model and measured its device."""

    facts: DeviceFacts


class CoreReady(msgspec.Struct, frozen=True, tag="core_ready"):
    """The engine accepts connections."""

    plan: CachePlan
    facts: list[DeviceFacts] = []
    """What each worker has measured, in order of rank."""


class ServerReady(msgspec.Struct, frozen=True, tag="server_ready"):
    """The HTTP process answers callers."""


class StartupFailed(msgspec.Struct, frozen=True, tag="startup_failed"):
    """The child cannot start and exits; `message` is the root cause in one line."""

    phase: str
    error_type: str
    message: str
    hint: str = ""
    traceback: str = ""


ControlMessage = Hello | Progress | PhaseDone | WorkerReady | CoreReady | ServerReady | StartupFailed
