"""Messages between parent and child: the launch spec down, control messages up.

The spec is written to the child's standard input, which then stays open: end of file means that the
parent is gone. Control messages are written to a second pipe, whose end of file means that the
child is gone. Each message is a 4-byte little-endian length and a msgpack body.
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
    """Epoch of the core that will be stopped so that this one can take over; 0: none."""
    remote_address: str = ""
    """A `tcp://` address for frontends of other machines; "": none."""
    facts: list[DeviceFacts] = []
    """Measurements of an earlier core with this configuration; []: the workers measure."""
    lock_step_path: str = ""
    """Of the socket on which the first of the engines that divide the experts listens; "": engines do not."""
    lock_step_fd: int = -1
    """Of the first engine: that socket, inherited."""
    predecessor_dir: str = ""
    """The `run_dir` of the crashed core whose requests will be resubmitted to this one; "": none."""
    weights_dir: str = ""
    """Directory in shared memory for weights that clients send, which all cores of the engine have; "": there is none.
    """
    predecessor_end: str = ""
    """How that core crashed, for messages."""
    fork_server_fd: int = -1
    """An inherited connection to the fork server of the process that starts the core; -1: there is none."""
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
    """Where a worker is in a group whose ranks are on several machines (nodes)."""

    node: int
    """Index of its node."""
    first_ranks: list[int]
    """The first rank of each node, and the number of ranks."""
    link_addresses: list[str]
    """By node: HOST:PORT where its first rank listens for those of the other nodes."""
    secret: str = ""
    """Secret key of the group; "": all addresses are of this machine."""
    listener_fd: int = -1
    """Of the first rank of a node: its inherited listening socket."""


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
    """Inherited file of zeros, through whose memory the ranks of this machine exchange rows; -1: this is the only rank.
    """
    engines_fd: int = -1
    """Inherited file of zeros that the workers of all engines share, if these divide the experts; -1: they do not."""
    rendezvous: str = ""
    """File that does not exist yet, in which ranks that compute through torch find each other."""
    facts: DeviceFacts | None = None
    """Measurements of an earlier worker of this rank; None: measure."""
    place: NodePlace | None = None
    """None: all ranks are on this machine."""
    device_number: int = -1
    """Which of this machine's devices it uses; -1: that of its rank."""
    generation: int = 0
    """Of its group: how often this core has started its workers before."""
    log_level: str = "INFO"
    log_config: str = ""
    """See `configure_logging`."""
    version: int = PROTOCOL_VERSION

    @property
    def process_title(self) -> tuple[str, str]:
        """See `CoreSpec`."""
        return "worker", f"{self.config.engine_index}.{self.rank}"


class ServerSpec(msgspec.Struct, frozen=True, kw_only=True, tag="server"):
    """Everything that a further HTTP process (`--api-server-count`) needs to start."""

    config: ServerConfig
    """Including the API keys, from whichever source."""
    address: str
    """Path of the socket on which the parent tells which engines there are."""
    listener_fd: int
    """The inherited listening socket."""
    counters_path: str
    """The file with the metrics of all HTTP processes."""
    row: int
    """This process's own row in it, from 1: the first process has 0."""
    log_level: str = "INFO"
    log_config: str = ""
    """See `configure_logging`."""
    version: int = PROTOCOL_VERSION

    @property
    def process_title(self) -> tuple[str, str]:
        """See `CoreSpec`."""
        return "api", str(self.row)


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True, tag="agent"):
    """Everything that a node agent needs to start: it runs the workers of one machine for a core elsewhere."""

    core_address: str
    """Where the core listens for agents: `tcp://...`."""
    secret: str = ""
    """Secret key of the group; "": the core is on this machine."""
    node: str
    """Name of this machine, for messages; agents of the same name share memory."""
    position: int = -1
    """Place of this machine among all nodes; -1: any."""
    capacity: int
    """Most ranks that it runs."""
    worker_module: str
    """What each worker runs."""
    model: ModelFacts | None = None
    """The model as this machine has it; None: under the same path as on the core's."""
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
    """The child runs; its signal handlers and its parent watch are installed."""

    pid: int
    version: int = PROTOCOL_VERSION


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The child has entered a phase of its start-up, or made progress in it."""

    phase: str
    fraction: float | None = None
    """0 to 1; None: unknown."""


class PhaseDone(msgspec.Struct, frozen=True, tag="phase_done"):
    """Duration of a phase of the start-up, for the timeline in the log."""

    process: str
    phase: str
    seconds: float


class ForkRequest(msgspec.Struct, frozen=True):
    """What a forked worker takes over from its core instead of from the fork server, which another one may have started
    long ago in other surroundings.
    """

    core_pid: int
    """`ps` shows it, as the worker is no child of its core."""
    control_fd: int
    """The number of the control pipe in the worker."""
    inherited: list[int]
    """The numbers of the descriptors that come after it."""
    environment: dict[str, str]
    directory: str
    """The working directory; "": it has been removed."""
    processors: list[int]
    """On which the worker may run."""


class WorkerReady(msgspec.Struct, frozen=True, tag="worker_ready"):
    """The worker has loaded its model and measured its device."""

    facts: DeviceFacts


class CoreReady(msgspec.Struct, frozen=True, tag="core_ready"):
    """The engine accepts connections."""

    plan: CachePlan
    facts: list[DeviceFacts] = []
    """Measurements of each worker, in order of rank."""


class ServerReady(msgspec.Struct, frozen=True, tag="server_ready"):
    """The HTTP process accepts connections."""


class StartupFailed(msgspec.Struct, frozen=True, tag="startup_failed"):
    """The child cannot start and exits; `message` is the root cause in one line."""

    phase: str
    error_type: str
    message: str
    hint: str = ""
    traceback: str = ""


ControlMessage = Hello | Progress | PhaseDone | WorkerReady | CoreReady | ServerReady | StartupFailed
