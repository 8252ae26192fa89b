"""The sockets between processes, each with one job; bytes in the middle, messages at both ends.

| from, to | sockets | carries |
| --- | --- | --- |
| frontends, core | DEALER connect, ROUTER bind | `Request`, `Event` |
| core, workers | XPUB bind, SUB connect | `WorkerCommand` |
| workers, core | PUSH connect, PULL bind | `WorkerReply` |

The asynchronous end of the first row is `frontend/link.py`. Every queue is bounded.
"""

import contextlib
import logging
import socket as socket_module
from pathlib import Path

import zmq

from octavo.protocol.codec import (
    Kind,
    event_codec,
    request_codec,
    worker_command_codec,
    worker_reply_codec,
)
from octavo.protocol.curve import Authenticator, EngineKeys, prepare_listener
from octavo.protocol.errors import ProtocolError, StartupError
from octavo.protocol.events import Event, refuse_version
from octavo.protocol.log import LimitedLog
from octavo.protocol.malformed import Malformed, examine
from octavo.protocol.requests import Connect, Request
from octavo.protocol.steps import WorkerCommand, WorkerReply

logger = logging.getLogger(__name__)

HIGH_WATER_MARK = 1024
"""Messages a socket queues for one peer before a send is refused."""

MAX_FRAME_BYTES = 64 * 2**20
"""A peer that sends a larger frame is disconnected by zmq."""

MAX_RECEIVED_AT_ONCE = 256
"""Requests taken from the socket between two steps, so that a flood cannot stop the step loop."""


class PeerLost(ProtocolError):
    """The frontend that a message was for is gone."""


class Publisher:
    """Core to workers: one message, every worker, none dropped."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self.address = address
        self.next_sequence = 0
        self._codec = worker_command_codec()
        self.socket = context.socket(zmq.XPUB)
        """Readable when a worker has subscribed."""
        self.socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # else only the first subscription would be seen
        self.socket.setsockopt(zmq.XPUB_NODROP, 1)
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.LINGER, 1000)
        _bind(self.socket, address)

    def take_subscriptions(self) -> int:
        """Return how many workers have subscribed since the last call: what is sent before that never reaches them."""
        num_subscribed = 0
        while (frames := _receive(self.socket, timeout_s=0)) is not None:
            num_subscribed += frames[0].startswith(b"\x01")
        return num_subscribed

    def send(self, command: WorkerCommand) -> None:
        """Broadcast a command, whose `sequence` must be `next_sequence`."""
        if command.sequence != self.next_sequence:
            raise ProtocolError(f"command {command.sequence} sent where {self.next_sequence} is due")
        self.socket.send(self._codec.encode(command))
        self.next_sequence += 1

    def close(self) -> None:
        """Close the socket, and let nobody connect to its address any more; what was sent still leaves."""
        self.socket.close()
        _remove_file(self.address)


class Subscriber:
    """A worker's end of the broadcast."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self.malformed_frames = 0
        self._next_sequence = 0
        self._codec = worker_command_codec()
        self._log = LimitedLog(logger)
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.connect(address)

    def receive(self, timeout_s: float | None = None) -> WorkerCommand | None:
        """Return the next command, or None when none came in time.

        A message that does not decode is counted, logged and dropped. If it was meant as a command, the next one shows
        that it is missing.

        Blocks until: a command comes, or none has for `timeout_s` (None: for ever).

        Raises:
            ProtocolError: a command was lost; this worker's state is no longer the core's, and it must not go on.
        """
        while (frames := _receive(self.socket, timeout_s)) is not None:
            try:
                command = self._codec.decode(only_frame(frames))
            except ProtocolError as error:
                self.malformed_frames += 1
                self._log.warning("dropped a message from the core: %s", error)
                continue
            if command.sequence != self._next_sequence:
                raise ProtocolError(f"command {self._next_sequence} was lost: got {command.sequence}")
            self._next_sequence += 1
            return command
        return None

    def close(self) -> None:
        """Close the socket."""
        self.socket.close(linger=0)


class ResultPush:
    """A worker's answers."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self._codec = worker_reply_codec()
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.connect(address)

    def send(self, reply: WorkerReply) -> None:
        """Send an answer to the core."""
        self._socket.send(self._codec.encode(reply))

    def close(self) -> None:
        """Close the socket; what was sent still leaves."""
        self._socket.close()


class ResultPull:
    """Where the core hears its workers."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self.address = address
        self.malformed_frames = 0
        self._codec = worker_reply_codec()
        self._log = LimitedLog(logger)
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        _bind(self.socket, address)

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return bool(self.socket.closed)

    def receive(self, timeout_s: float | None = None) -> WorkerReply | None:
        """Return the next answer, or None when none came in time (None: wait for ever).

        A message that does not decode is counted, logged and dropped.
        """
        while (frames := _receive(self.socket, timeout_s)) is not None:
            try:
                return self._codec.decode(only_frame(frames))
            except ProtocolError as error:
                self.malformed_frames += 1
                self._log.warning("dropped a message from a worker: %s", error)
        return None

    def close(self) -> None:
        """Close the socket, and let nobody connect to its address any more."""
        self.socket.close(linger=0)
        _remove_file(self.address)


class FrontendRouter:
    """The core's end of all frontends."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self.address = address
        self.malformed_frames = 0
        self._context = context
        self._requests = request_codec()
        self._events = event_codec()
        self._log = LimitedLog(logger)
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.socket.setsockopt(zmq.LINGER, 1000)
        _bind(self.socket, address)

    def listen_remotely(self, address: str, keys: EngineKeys | None) -> None:
        """Let frontends come to a `tcp://` address as well; those of the first address need no keys.

        Raises:
            ConfigError: the address can be reached from other machines, and there are no keys.
            StartupError: it cannot be bound.
        """
        prepare_listener(self.socket, address, keys)
        if keys:
            Authenticator(self._context, keys.clients)
        _bind(self.socket, address)

    def receive(self) -> list[tuple[bytes, Request | Malformed]]:
        """Return what has arrived, with each sender's identity; [] when nothing has. Never blocks.

        A message that does not decode is counted and logged, and comes as a `Malformed`.
        """
        received: list[tuple[bytes, Request | Malformed]] = []
        while len(received) < MAX_RECEIVED_AT_ONCE:
            try:
                peer, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                received.append((peer, self._requests.decode(only_frame(frames))))
            except ProtocolError as error:
                self.malformed_frames += 1
                self._log.warning("cannot read a message from frontend %s: %s", peer.hex(), error)
                if self._is_first_version(frames):
                    self._refuse_first_version(peer)
                else:
                    received.append((peer, examine(frames[0] if frames else b"", str(error))))
        return received

    def _is_first_version(self, frames: list[bytes]) -> bool:
        """True for the `Connect` of protocol version 1, which put the kind of a message into a frame of its own."""
        if len(frames) != 2 or frames[0] != bytes([Kind.REQUEST]):
            return False
        try:
            return isinstance(self._requests.decode(b"".join(frames)), Connect)
        except ProtocolError:
            return False

    def _refuse_first_version(self, peer: bytes) -> None:
        """Say so in frames that such a frontend can read; it would wait in vain for anything else."""
        frame = self._events.encode(refuse_version(1))
        with contextlib.suppress(zmq.ZMQError):  # it has left, or does not read
            self.socket.send_multipart([peer, frame[:1], frame[1:]], zmq.NOBLOCK)

    def send(self, peer: bytes, event: Event) -> bool:
        """Send an event; False when the peer reads too slowly and its queue is full. Never blocks.

        Raises:
            PeerLost: nobody has this identity any more.
        """
        try:
            self.socket.send_multipart([peer, self._events.encode(event)], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerLost(f"frontend {peer.hex()} is gone") from error
            raise
        return True

    def close(self) -> None:
        """Close the socket; what was sent still leaves, for at most a second."""
        self.socket.close()


def only_frame(frames: list[bytes]) -> bytes:
    """Return the one frame of a message.

    Raises:
        ProtocolError: it has more.
    """
    if len(frames) != 1:
        raise ProtocolError(f"a message is one frame, not {len(frames)}")
    return frames[0]


def ipc_path(address: str) -> Path | None:
    """Return the file of an `ipc://` address, None for other transports."""
    return Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None


def _receive(socket: "zmq.Socket[bytes]", timeout_s: float | None) -> list[bytes] | None:
    """Return the frames of the next message, None when none came in time (None: wait for ever)."""
    try:
        # perf: most messages are there when they are asked for, and then nobody needs to poll.
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        if timeout_s == 0 or not socket.poll(None if timeout_s is None else int(1000 * timeout_s)):
            return None
    return socket.recv_multipart()


def _bind(socket: "zmq.Socket[bytes]", address: str) -> None:
    path = ipc_path(address)
    if path and is_listening(path):
        socket.close(linger=0)
        raise StartupError(
            f"cannot bind {address}: another engine listens there",
            phase="binding sockets",
            hint="stop it, or choose another address",
        )
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise StartupError(
            f"cannot bind {address}: {error.strerror}",
            phase="binding sockets",
            hint="does the directory exist, and may this user write there?",
        ) from error
    if path:
        with contextlib.suppress(FileNotFoundError):
            path.chmod(0o600)


def _remove_file(address: str) -> None:
    """Remove the file of a socket that was closed: zmq leaves it behind."""
    if path := ipc_path(address):
        path.unlink(missing_ok=True)


def is_listening(path: Path) -> bool:
    """True when a living process has this socket: zmq itself would take it away from that process."""
    with socket_module.socket(socket_module.AF_UNIX, socket_module.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
