"""Messages between a core and the agents that run its workers on other machines (nodes), and their two sockets.

An agent connects to one address of its core. It subscribes to the commands for its own id and sends its messages on the
same connection. So the core detects a lost connection by the end of the subscription: at once if the agent's process
dies, and after `SILENCE_TIMEOUT_S` if its machine does.
"""

import logging
from typing import TypeAlias

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from octavo.protocol import PROTOCOL_VERSION
from octavo.protocol.channel import bind_for_group
from octavo.protocol.control import ControlMessage, StartupFailed, WorkerSpec
from octavo.protocol.curve import ClientKeys, EngineKeys, prepare_connection
from octavo.protocol.log import LimitedLog

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2
SILENCE_TIMEOUT_S = 10
"""Seconds without a message after which an agent or a core counts as dead."""

_SUBSCRIBE, _UNSUBSCRIBE, _MESSAGE = b"\x01", b"\x00", b"\x02"
"""First byte of a frame from an agent. The first two are ZMTP's own: https://rfc.zeromq.org/spec/29."""


class AgentReady(msgspec.Struct, frozen=True, kw_only=True, tag="agent_ready"):
    """An agent has no running ranks, and can start some."""

    agent: str
    node: str
    """Agents of the same node share memory."""
    position: int
    """Position of the node among all nodes; -1 for any."""
    capacity: int
    """Most ranks that it runs."""
    memory_path: str
    """Zero-filled file that ranks of this node can map."""
    instruction_sets: list[str]
    """Instruction sets of its CPU, on which the bits of the native kernels depend."""
    link_address: str
    """HOST:PORT on which a rank will listen for ranks of other nodes."""
    version: int = PROTOCOL_VERSION
    release: str = ""
    """Release of octavo. Another one may compute different bits."""


class RankReport(msgspec.Struct, frozen=True, kw_only=True, tag="rank_report"):
    """A control message of a rank."""

    agent: str
    generation: int
    rank: int
    message: ControlMessage


class RankExited(msgspec.Struct, frozen=True, kw_only=True, tag="rank_exited"):
    """The process of a rank has exited."""

    agent: str
    generation: int
    rank: int
    code: int
    failure: StartupFailed | None


class StartRanks(msgspec.Struct, frozen=True, kw_only=True, tag="start_ranks"):
    """Start some ranks of a group."""

    generation: int
    memory_path: str
    """`AgentReady.memory_path` of one agent of this node."""
    specs: list[WorkerSpec]


class EndRanks(msgspec.Struct, frozen=True, kw_only=True, tag="end_ranks"):
    """Kill all ranks. The reply is `AgentReady`."""


class Dismiss(msgspec.Struct, frozen=True, kw_only=True, tag="dismiss"):
    """The engine has ended: kill all ranks and exit."""


AgentMessage: TypeAlias = AgentReady | RankReport | RankExited
AgentCommand: TypeAlias = StartRanks | EndRanks | Dismiss


class AgentLost(msgspec.Struct, frozen=True):
    """The connection to an agent has ended. Created by the core's own end."""

    agent: str


class AgentsSocket:
    """The core's end of the connections to all agents.

    Args:
        context: ZeroMQ context, with an `Authenticator` if there are keys.
        address: `tcp://HOST:PORT`; port `*` means any free port.
        keys: keys of the group. None if only this machine can reach the address.

    Raises:
        ConfigError: other machines can reach the address, but there are no keys.
        StartupError: the address cannot be bound.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: EngineKeys | None) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentMessage)
        self._log = LimitedLog(logger)
        self.socket = context.socket(zmq.XPUB)
        self.socket.setsockopt(zmq.XPUB_NODROP, 1)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.address = bind_for_group(self.socket, address, keys)

    def receive(self) -> AgentMessage | AgentLost | None:
        """Return the next message. Return None if there is none. Never blocks. Malformed messages are logged and
        dropped."""
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if frame[:1] == _UNSUBSCRIBE:
                return AgentLost(frame[1:].decode(errors="replace"))
            if frame[:1] == _MESSAGE:
                try:
                    return self._decoder.decode(frame[1:])
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    self._log.warning("dropped a malformed message of a node agent: %s", error)

    def send(self, agent: str, command: AgentCommand) -> None:
        """Send a command to one agent. If the agent is dead, the command is lost and `receive` reports the loss of the
        agent."""
        self.socket.send_multipart([agent.encode(), self._encoder.encode(command)])

    def close(self) -> None:
        """Close the socket. Pending commands are still delivered."""
        self.socket.close()


class AgentSocket:
    """An agent's end of the connection.

    Args:
        context: ZeroMQ context of this process.
        address: address of the core.
        keys: keys of the group. None if the core is on this machine.
        agent: unique id of this agent.

    Raises:
        ConfigError: the address needs keys.
    """

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: ClientKeys | None, agent: str
    ) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[AgentCommand] = msgspec.msgpack.Decoder(AgentCommand)
        self.has_failed_handshake = False
        """True if the core has rejected this agent's key, or has a different key."""
        self.socket = context.socket(zmq.XSUB)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        """Readable when the connection has changed."""
        prepare_connection(self.socket, address, keys)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, 1000 * HEARTBEAT_S)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1000 * SILENCE_TIMEOUT_S)
        self.socket.setsockopt(zmq.HEARTBEAT_TTL, 1000 * SILENCE_TIMEOUT_S)
        self.socket.connect(address)
        self.socket.send(_SUBSCRIBE + agent.encode())

    def connection_change(self) -> bool | None:
        """Return True if the connection was established, False if it was lost, None if neither. Never blocks."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return True
            if event == zmq.EVENT_DISCONNECTED:
                return False
            self.has_failed_handshake = True
        return None

    def receive(self) -> AgentCommand | None:
        """Return the next command. Return None if there is none. Never blocks.

        Raises:
            msgspec.MsgspecError: the command is malformed: the core has another version.
        """
        try:
            _, body = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return self._decoder.decode(body)

    def send(self, message: AgentMessage) -> None:
        """Send a message to the core."""
        # One frame: zmq would interpret a later frame that begins with 0 or 1 as a subscription.
        self.socket.send(_MESSAGE + self._encoder.encode(message))

    def close(self) -> None:
        """Close the socket. Pending messages are still delivered."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()
