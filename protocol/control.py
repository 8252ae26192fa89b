"""Messages between parent and child: the launch spec down, control messages up.

The spec is written to the child's standard input, which then stays open: its end of file means that the parent has
died. Control messages are written to a second pipe, whose end of file means that the child has died. Each message is a
4-byte little-endian length and a msgpack body.
"""

import msgspec

from octavo.protocol import PROTOCOL_VERSION
from octavo.protocol.config import CachePlan, DeviceFacts, ModelFacts, ResolvedConfig, ServerConfig


class CoreSpec(msgspec.Struct, frozen=True, kw_only=True, tag="core"):
    """Everything that a core process needs to start."""

    config: ResolvedConfig
    address: str
    """Where to bind the frontends' ROUTER socket: `ipc://...`."""
    run_dir: str
    """Private directory of this engine, for the workers' sockets and the pulse file."""
    epoch: int
    replaced_epoch: int = 0
    """Epoch of the core that will be stopped and replaced by this one; 0 if there is none."""
    remote_address: str = ""
    """A `tcp://` address for frontends on other machines. Empty if there is none."""
    facts: list[DeviceFacts] = []
    """Measurements of an earlier core with this configuration. Empty if the workers must measure."""
    lock_step_path: str = ""
    """Path of the socket on which the first engine listens, if several engines share the experts. Empty otherwise."""
    lock_step_fd: int = -1
    """The inherited listening socket, if this is the first engine; otherwise -1."""
    predecessor_dir: str = ""
    """The `run_dir` of the crashed core whose requests will be resubmitted to this one. Empty if there is none."""
    weights_dir: str = ""
    """Directory in shared memory for weights uploaded by clients, used by all cores of the engine. Empty if there is
    none."""
    predecessor_end: str = ""
    """How that core crashed, for messages."""
    fork_server_fd: int = -1
    """An inherited connection to the fork server of the process that starts the core; -1 if there is none."""
    log_level: str = "INFO"
    log_config: str = ""
    """See `configure_logging`."""
    check_invariants: bool = False
    version: int = PROTOCOL_VERSION

    @property
    def process_title(self) -> tuple[str, str]:
        """Kind and name of the process, for `ps`."""
        return "core", str(self.config.engine_index)


class NodePlace(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a worker in a group whose ranks are on several machines (nodes)."""

    node: int
    """Index of its node."""
    first_ranks: list[int]
    """The first rank of each node, and finally the number of ranks."""
    link_addresses: list[str]
    """For each node, HOST:PORT on which its first rank listens for other nodes."""
    secret: str = ""
    """Secret key of the group. Empty if all addresses are on this machine."""
    listener_fd: int = -1
    """Inherited listening socket of the first rank of a node; -1 for other ranks."""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True, tag="worker"):
    """Everything that a worker process needs to start."""

    config: ResolvedConfig
    rank: int
    world_size: int
    plan_address: str
    """XPUB socket of the core, to subscribe to."""
    result_address: str
    """PULL socket of the core, to push to."""
    exchange_fd: int = -1
    """Inherited zero-filled file, in whose memory the ranks of this machine exchange rows; -1 if this is the only
    rank."""
    engines_fd: int = -1
    """Inherited zero-filled file shared by the workers of all engines that share the experts; -1 otherwise."""
    rendezvous: str = ""
    """Path of a new file through which ranks that compute through torch find each other."""
    facts: DeviceFacts | None = None
    """Measurements of an earlier worker of this rank. None if it must measure."""
    place: NodePlace | None = None
    """None if all ranks are on this machine."""
    device_number: int = -1
    """Index of the device to use on this machine; -1 for the device with the index of its rank."""
    generation: int = 0
    """Generation of its group: how often this core has started its workers before."""
    log_level: str = "INFO"
    log_config: str = ""
    """See `configure_logging`."""
    version: int = PROTOCOL_VERSION

    @property
    def process_title(self) -> tuple[str, str]:
        """See `CoreSpec`."""
        return "worker", f"{self.config.engine_index}.{self.rank}"


class ServerSpec(msgspec.Struct, frozen=True, kw_only=True, tag="server"):
    """Everything that an additional HTTP process (`--api-server-count`) needs to start."""

    config: ServerConfig
    """Includes the API keys from all sources."""
    address: str
    """Path of the socket on which the parent announces the engines."""
    listener_fd: int
    """The inherited listening socket."""
    counters_path: str
    """File with the metrics of all HTTP processes."""
    row: int
    """This process's row in the file, from 1. The first process has row 0."""
    log_level: str = "INFO"
    log_config: str = ""
    """See `configure_logging`."""
    version: int = PROTOCOL_VERSION

    @property
    def process_title(self) -> tuple[str, str]:
        """See `CoreSpec`."""
        return "api", str(self.row)


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True, tag="agent"):
    """Everything that a node agent needs to start. It runs the workers of one machine for a core elsewhere."""

    core_address: str
    """Where the core listens for agents: `tcp://...`."""
    secret: str = ""
    """Secret key of the group. Empty if the core is on this machine."""
    node: str
    """Name of this machine, for messages. Agents with the same name share memory."""
    position: int = -1
    """Position of this machine among all nodes; -1 for any."""
    capacity: int
    """Most ranks that it runs."""
    worker_module: str
    """The module that each worker runs."""
    model: ModelFacts | None = None
    """The model as found on this machine. None if it has the same path as on the core's machine."""
    log_level: str = "INFO"
    log_config: str = ""
    """See `configure_logging`."""
    version: int = PROTOCOL_VERSION

    @property
    def process_title(self) -> tuple[str, str]:
        """See `CoreSpec`."""
        return "agent", self.node


LaunchSpec = CoreSpec | WorkerSpec | ServerSpec | AgentSpec


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The child is running. Its signal handlers and its parent watch are installed."""

    pid: int
    version: int = PROTOCOL_VERSION


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The child has entered a start-up phase, or made progress in it."""

    phase: str
    fraction: float | None = None
    """0 to 1. None if unknown."""


class PhaseDone(msgspec.Struct, frozen=True, tag="phase_done"):
    """Duration of a start-up phase, for the timeline in the log."""

    process: str
    phase: str
    seconds: float


class ForkRequest(msgspec.Struct, frozen=True):
    """What a forked worker inherits from its core instead of from the fork server, which another core may have started
    long ago in a different environment."""

    core_pid: int
    """Shown by `ps`, because the worker is not a child of its core."""
    control_fd: int
    """The number of the control pipe in the worker."""
    inherited: list[int]
    """The numbers of the inherited descriptors."""
    environment: dict[str, str]
    directory: str
    """The working directory. Empty if it was removed."""
    processors: list[int]
    """CPUs on which the worker may run."""


class WorkerReady(msgspec.Struct, frozen=True, tag="worker_ready"):
    """The worker has loaded its model and measured its device."""

    facts: DeviceFacts


class CoreReady(msgspec.Struct, frozen=True, tag="core_ready"):
    """The engine accepts connections."""

    plan: CachePlan
    facts: list[DeviceFacts] = []
    """Measurements of each worker, ordered by rank."""


class ServerReady(msgspec.Struct, frozen=True, tag="server_ready"):
    """The HTTP process accepts connections."""


class StartupFailed(msgspec.Struct, frozen=True, tag="startup_failed"):
    """The child cannot start and exits. `message` is the root cause in one line."""

    phase: str
    error_type: str
    message: str
    hint: str = ""
    traceback: str = ""


ControlMessage = Hello | Progress | PhaseDone | WorkerReady | CoreReady | ServerReady | StartupFailed
