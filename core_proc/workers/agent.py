"""`NodeAgent`: runs the workers of one machine for a core on another machine."""

import logging
import os
import select
import socket
import time
import uuid

import msgspec
import zmq

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.control import AgentSpec, StartupFailed, WorkerSpec
from octavo.protocol.curve import GroupKeys
from octavo.protocol.errors import StartupError
from octavo.protocol.identity import instruction_sets
from octavo.protocol.lifecycle import EXIT_STARTUP_FAILED, StopSignal
from octavo.protocol.nodes import AgentReady, AgentSocket, Dismiss, EndRanks, RankExited, RankReport, StartRanks
from octavo.protocol.supervise import Child, ChildExited
from octavo.protocol.version import __version__

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 120.0
"""Seconds to wait for a core, at the start and after the connection was lost: the core may be restarting."""
_RETRY_S = 0.5


class NodeAgent:
    """Serves one core after another at the same address, until it is dismissed.

    Call all methods from one thread: the workers die with that thread.

    Args:
        spec: what to run, and for which core.
        stop: the signals of this process. None if another part of the process handles them.
    """

    def __init__(self, spec: AgentSpec, stop: StopSignal | None = None) -> None:
        self._spec = spec
        self._stop = stop
        self._keys = GroupKeys(spec.secret.encode()) if spec.secret else None

    def run(self) -> None:
        """Serve cores.

        Blocks until: a core has dismissed this agent, or a signal has arrived.

        Raises:
            StartupError: no core responds for `CONNECT_TIMEOUT_S`.
        """
        host = self._find_host()
        while not (self._stop and self._stop.count):
            connection = _Connection(self._spec, self._keys, host, self._stop)
            try:
                if connection.serve():
                    return
            finally:
                connection.close()

    def _find_host(self) -> str:
        """Return the address of this machine. Return "" after a signal.

        Blocks until: the core's host name can be resolved. In a cluster that may happen only after this process has
        started.

        Raises:
            StartupError: the name cannot be resolved for `CONNECT_TIMEOUT_S`.
        """
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        poll = select.poll()
        if self._stop:
            poll.register(self._stop.fileno(), select.POLLIN)
        while not (self._stop and self._stop.count):
            try:
                return own_host(self._spec.core_address)
            except StartupError:
                if time.monotonic() >= deadline:
                    raise
            poll.poll(1000 * _RETRY_S)
        return ""


class _Connection:
    """One connection to a core, and the workers started through it."""

    def __init__(self, spec: AgentSpec, keys: GroupKeys | None, host: str, stop: StopSignal | None) -> None:
        self._spec, self._keys, self._host, self._stop = spec, keys, host, stop
        self._agent = uuid.uuid4().hex
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = AgentSocket(self._context, spec.core_address, keys.client if keys else None, self._agent)
        self._is_connected = False
        self._generation = -1
        self._children: dict[int, Child] = {}
        """Worker processes by rank."""
        self._memory_fd = -1
        self._listener: socket.socket | None = None

    def serve(self) -> bool:
        """Serve until the connection is lost or a signal arrives. Return whether the core dismissed us.

        Raises:
            StartupError: the core does not respond.
        """
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while not (self._stop and self._stop.count):
            self._wait(None if self._is_connected else max(0.0, deadline - time.monotonic()))
            change = self._socket.connection_change()
            if change:
                logger.info("joined the engine at %s", self._spec.core_address)
                self._is_connected = True
                self._offer()
            elif change is False and self._is_connected:
                logger.warning("lost the connection to the engine at %s; its workers here end", self._spec.core_address)
                return False
            elif not self._is_connected and time.monotonic() >= deadline:
                raise self._no_reply_error()
            while (command := self._socket.receive()) is not None:
                if isinstance(command, Dismiss):
                    logger.info("the engine at %s has ended", self._spec.core_address)
                    return True
                self._handle(command)
            self._report()
        return True

    def close(self) -> None:
        """Kill the workers and disconnect. Blocks until: the workers have ended."""
        self._end_ranks()
        self._discard_offer()
        self._socket.close()
        self._context.term()

    def _no_reply_error(self) -> StartupError:
        reason = "it has another key, or does not know ours" if self._socket.has_failed_handshake else "nothing answers"
        return StartupError(
            f"cannot join the engine at {self._spec.core_address}: {reason}",
            phase="joining the engine",
            hint="check that node 0 runs, the address, the firewall, and that all nodes have the same key file",
        )

    def _wait(self, timeout_s: float | None) -> None:
        poller = zmq.Poller()
        for waitable in (
            self._socket.socket,
            self._socket.monitor,
            *(child.fileno() for child in self._children.values()),
        ):
            poller.register(waitable, zmq.POLLIN)
        if self._stop:
            poller.register(self._stop.fileno(), zmq.POLLIN)
        poller.poll(None if timeout_s is None else int(1000 * timeout_s) + 1)

    def _offer(self) -> None:
        """Tell the core that ranks can be started here, with new shared memory and a new address."""
        self._discard_offer()
        self._memory_fd = os.memfd_create("octavo-ranks")
        self._listener = socket.create_server((self._host, 0))
        self._socket.send(
            AgentReady(
                agent=self._agent,
                node=self._spec.node,
                position=self._spec.position,
                release=__version__,
                capacity=self._spec.capacity,
                instruction_sets=instruction_sets(),
                memory_path=f"/proc/{os.getpid()}/fd/{self._memory_fd}",
                link_address=f"{self._host}:{self._listener.getsockname()[1]}",
            )
        )

    def _discard_offer(self) -> None:
        if self._memory_fd >= 0:
            os.close(self._memory_fd)
            self._memory_fd = -1
        if self._listener:
            self._listener.close()
            self._listener = None

    def _handle(self, command: StartRanks | EndRanks) -> None:
        if isinstance(command, EndRanks):
            self._end_ranks()
            self._offer()
            return
        self._generation = command.generation
        if failure := self._other_model(command.specs[0].config):
            exited = RankExited(
                agent=self._agent,
                generation=command.generation,
                rank=command.specs[0].rank,
                code=EXIT_STARTUP_FAILED,
                failure=failure,
            )
            self._socket.send(exited)
            return
        memory_fd = os.open(command.memory_path, os.O_RDWR | os.O_CLOEXEC)
        try:
            for spec in command.specs:
                self._children[spec.rank] = self._spawn(spec, memory_fd)
        finally:
            os.close(memory_fd)

    def _spawn(self, spec: WorkerSpec, memory_fd: int) -> Child:
        assert spec.place is not None and self._listener is not None
        inherited, place = [memory_fd], spec.place
        if spec.rank == place.first_ranks[place.node]:
            inherited.append(self._listener.fileno())
            place = msgspec.structs.replace(place, listener_fd=self._listener.fileno())
        spec = msgspec.structs.replace(spec, config=self._localized(spec.config), exchange_fd=memory_fd, place=place)
        return Child.spawn(self._spec.worker_module, spec, f"worker {spec.rank}", inherited=inherited)

    def _localized(self, config: ResolvedConfig) -> ResolvedConfig:
        """Return the configuration with the paths of the model on this machine."""
        own = self._spec.model
        if own is None:
            return config
        model = msgspec.structs.replace(config.model, model_path=own.model_path, tokenizer_path=own.tokenizer_path)
        return msgspec.structs.replace(config, model=model)

    def _other_model(self, config: ResolvedConfig) -> StartupFailed | None:
        """Return the error if this machine has a different model than the core. Return None if no difference is
        known."""
        own = self._spec.model
        if own is None or own.hf_config == config.model.hf_config:
            return None
        expected = config.model.model_path
        return StartupFailed(
            phase="starting workers",
            error_type="ConfigError",
            message=f"node {self._spec.node} has another model, {own.model_path}, than node 0, {expected}",
            hint="give octavo serve the same model on all nodes",
        )

    def _report(self) -> None:
        """Forward the workers' reports, and report how they ended."""
        for rank, child in list(self._children.items()):
            try:
                while (message := child.receive(timeout_s=0)) is not None:
                    report = RankReport(agent=self._agent, generation=self._generation, rank=rank, message=message)
                    self._socket.send(report)
            except ChildExited as exited:
                child.close()
                del self._children[rank]
                self._socket.send(
                    RankExited(
                        agent=self._agent,
                        generation=self._generation,
                        rank=rank,
                        code=exited.code,
                        failure=exited.failure,
                    )
                )

    def _end_ranks(self) -> None:
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.wait()
            child.close()
        self._children.clear()


def own_host(core_address: str) -> str:
    """Return the IPv4 address of this machine on the network that leads to the core, as zmq needs it.

    Raises:
        StartupError: there is no such network, or the core's name cannot be resolved.
    """
    host, _, port = core_address.removeprefix("tcp://").rpartition(":")
    try:
        address = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_DGRAM)[0][4]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StartupError(
            f"cannot reach {core_address}: {error}",
            phase="joining the engine",
            hint="check the address of node 0",
        ) from error
