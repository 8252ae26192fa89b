"""The sockets between processes: messages at both ends, frames in between.

| from, to | sockets | carries |
| --- | --- | --- |
| frontends, core | DEALER connect, ROUTER bind | `FrontendMessage`, `Event` |
| core, workers | XPUB bind, SUB connect | `WorkerCommand` |
| workers, core | PUSH connect, PULL bind | `WorkerReply` |

The asynchronous end of the first row is `frontend/wire.py`. Every queue is bounded.
"""

import contextlib
import logging
import socket as socket_module
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import zmq

from octavo.protocol.codec import (
    MAX_BUFFERS,
    Frame,
    Kind,
    event_codec,
    request_codec,
    worker_command_codec,
    worker_reply_codec,
)
from octavo.protocol.curve import Authenticator, ClientKeys, EngineKeys, prepare_connection, prepare_listener
from octavo.protocol.errors import ProtocolError, StartupError
from octavo.protocol.events import Event, reject_version
from octavo.protocol.log import LimitedLog
from octavo.protocol.malformed import Malformed, parse_malformed
from octavo.protocol.requests import Connect, FrontendMessage
from octavo.protocol.worker_commands import WorkerCommand, WorkerReply

logger = logging.getLogger(__name__)

HIGH_WATER_MARK = 1024
"""Most messages that a socket queues for one peer before a send fails."""

MAX_FRAME_BYTES = 64 * 2**20
"""zmq disconnects a peer that sends a larger frame."""

MAX_RECEIVED_AT_ONCE = 64
MAX_RECEIVED_BYTES_AT_ONCE = 2**18
"""Limits on the messages taken from the frontends' socket per step loop iteration, and on their bytes: a flood must not
delay steps. Remaining messages wait in the socket."""


class PeerLost(ProtocolError):
    """The frontend to which a message is addressed has disconnected."""


class Publisher:
    """Core to workers: broadcasts every message to every worker and drops none."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: EngineKeys | None = None) -> None:
        self.next_sequence = 0
        self._codec = worker_command_codec()
        self.socket = context.socket(zmq.XPUB)
        """Readable when a worker has subscribed or unsubscribed."""
        self.socket.setsockopt(zmq.XPUB_VERBOSER, 1)  # by default only the first and the last subscription are reported
        self.socket.setsockopt(zmq.XPUB_NODROP, 1)
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.address = bind_for_group(self.socket, address, keys)

    def take_subscriptions(self) -> int:
        """Return the change in the number of subscribed workers since the last call. New ones miss everything sent
        before.

        A worker on another machine whose connection is lost and re-established counts once.
        """
        num_subscribed = 0
        while (frames := _receive(self.socket, timeout_s=0)) is not None:
            num_subscribed += 1 if frames[0][:1] == b"\x01" else -1
        return num_subscribed

    def send(self, command: WorkerCommand) -> None:
        """Broadcast a command. Its `sequence` must be `next_sequence`."""
        if command.sequence != self.next_sequence:
            raise ProtocolError(f"command {command.sequence} sent, but {self.next_sequence} is next")
        send_message(self.socket, self._codec.encode(command))
        self.next_sequence += 1

    def close(self) -> None:
        """Close the socket and remove its file. Pending messages are still delivered."""
        self.socket.close()
        _remove_file(self.address)


class Subscriber:
    """A worker's end of the broadcast: receives commands in order."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: ClientKeys | None = None) -> None:
        self.malformed_frames = 0
        self._next_sequence = 0
        self._codec = worker_command_codec()
        self._log = LimitedLog(logger)
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        prepare_connection(self.socket, address, keys)
        self.socket.connect(address)

    def receive(self, timeout_s: float | None = None) -> WorkerCommand | None:
        """Return the next command. Return None if none arrives in time.

        A malformed message is counted, logged and dropped. If it was a command, the sequence number of the next command
        reveals the gap.

        Blocks until: a command arrives, or `timeout_s` has passed (None: no limit).

        Raises:
            ProtocolError: a command was lost. This worker's state no longer matches the core's, so it must exit.
        """
        while (frames := _receive(self.socket, timeout_s)) is not None:
            try:
                command = self._codec.decode(*frames)
            except ProtocolError as error:
                self.malformed_frames += 1
                self._log.warning("dropped a malformed message from the core: %s", error)
                continue
            if command.sequence != self._next_sequence:
                raise ProtocolError(f"command {self._next_sequence} was lost: received {command.sequence}")
            self._next_sequence += 1
            return command
        return None

    def has_command(self) -> bool:
        """Return whether a message has arrived that `receive` has not returned yet."""
        return bool(cast(int, self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close(linger=0)


class ResultPush:
    """A worker's end of the replies."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: ClientKeys | None = None) -> None:
        self._codec = worker_reply_codec()
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 2000)
        prepare_connection(self._socket, address, keys)
        self._socket.connect(address)

    def send(self, reply: WorkerReply) -> None:
        """Send a reply to the core."""
        send_message(self._socket, self._codec.encode(reply))

    def close(self) -> None:
        """Close the socket. Pending messages are still delivered."""
        self._socket.close()


class ResultPull:
    """The core's end of the replies."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: EngineKeys | None = None) -> None:
        self.malformed_frames = 0
        self._codec = worker_reply_codec()
        self._log = LimitedLog(logger)
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self.address = bind_for_group(self.socket, address, keys)

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return bool(self.socket.closed)

    def receive(self, timeout_s: float | None = None) -> WorkerReply | None:
        """Return the next reply. Return None if none arrives within `timeout_s` (None: no limit).

        A malformed message is counted, logged and dropped.
        """
        while (frames := _receive(self.socket, timeout_s)) is not None:
            try:
                return self._codec.decode(*frames)
            except ProtocolError as error:
                self.malformed_frames += 1
                self._log.warning("dropped a malformed message from a worker: %s", error)
        return None

    def close(self) -> None:
        """Close the socket and remove its file."""
        self.socket.close(linger=0)
        _remove_file(self.address)


class FrontendRouter:
    """The core's end of the connections to all frontends."""

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
        """Also listen on a `tcp://` address. Frontends of the first address need no keys.

        Raises:
            ConfigError: the address is reachable from other machines, but there are no keys.
            StartupError: the address cannot be bound.
        """
        prepare_listener(self.socket, address, keys)
        if keys:
            Authenticator(self._context, keys.clients)
        _bind(self.socket, address)

    def receive(self) -> list[tuple[bytes, FrontendMessage | Malformed]]:
        """Return a bounded number of received messages with their senders' identities. Never blocks.

        A message that cannot be decoded is counted, logged, and returned as a `Malformed`.
        """
        received: list[tuple[bytes, FrontendMessage | Malformed]] = []
        num_bytes = 0
        while len(received) < MAX_RECEIVED_AT_ONCE and num_bytes < MAX_RECEIVED_BYTES_AT_ONCE:
            try:
                peer = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            frames: list[Frame] = receive_message(self.socket) if self.socket.getsockopt(zmq.RCVMORE) else [b""]
            num_bytes += sum(map(len, frames))
            try:
                received.append((peer, self._requests.decode(*frames)))
            except ProtocolError as error:
                self.malformed_frames += 1
                self._log.warning("dropped a malformed message from frontend %s: %s", peer.hex(), error)
                if self._is_first_version(frames):
                    self._reject_first_version(peer)
                else:
                    received.append((peer, parse_malformed(bytes(frames[0]), str(error))))
        return received

    def _is_first_version(self, frames: list[Frame]) -> bool:
        """Return whether this is a `Connect` of protocol version 1, which sent the kind of a message in a separate
        frame."""
        if len(frames) != 2 or frames[0] != bytes([Kind.REQUEST]):
            return False
        try:
            return isinstance(self._requests.decode(b"".join(frames)), Connect)
        except ProtocolError:
            return False

    def _reject_first_version(self, peer: bytes) -> None:
        """Reply in the frames of version 1, the only ones that such a frontend can read."""
        frame = self._events.encode(reject_version(1))[0]
        with contextlib.suppress(zmq.ZMQError):  # it has disconnected, or does not read
            self.socket.send_multipart([peer, frame[:1], frame[1:]], zmq.NOBLOCK)

    def send(self, peer: bytes, event: Event) -> bool:
        """Send an event. Return False if the queue is full because the peer reads too slowly. Never blocks.

        Raises:
            PeerLost: no peer has this identity any more.
        """
        try:
            send_message(self.socket, [peer, *self._events.encode(event)], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerLost(f"frontend {peer.hex()} is gone") from error
            raise
        return True

    def close(self) -> None:
        """Close the socket. Pending messages are still delivered, for at most a second."""
        self.socket.close()


def send_message(socket: "zmq.Socket[bytes]", frames: Sequence[Frame], flags: int = 0) -> None:
    """Send the frames of a message. Large frames are not copied and must not change until they were sent.

    Raises:
        zmq.Again: with `zmq.NOBLOCK`, nothing was sent.
    """
    if len(frames) == 1:
        socket.send(frames[0], flags)
    else:
        # zmq still copies short frames, which is cheaper.
        socket.send_multipart(frames, flags, copy=False)


def receive_message(socket: "zmq.Socket[bytes]", flags: int = 0) -> list[Frame]:
    """Return the frames of the next message. Frames after the first stay in the memory into which zmq has read them.

    If a message has too many frames, only as many are kept as `Codec.decode` needs to reject it.

    Raises:
        zmq.Again: with `zmq.NOBLOCK`, there is no message.
    """
    frames: list[Frame] = [socket.recv(flags)]
    while socket.getsockopt(zmq.RCVMORE):
        buffer = socket.recv(copy=False).buffer
        if len(frames) <= MAX_BUFFERS + 1:
            frames.append(buffer)
    return frames


def ipc_path(address: str) -> Path | None:
    """Return the path of an `ipc://` address. Return None for other transports."""
    return Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None


def _receive(socket: "zmq.Socket[bytes]", timeout_s: float | None) -> list[Frame] | None:
    """Return the frames of the next message. Return None if none arrives within `timeout_s` (None: no limit)."""
    try:
        # perf: most messages have already arrived, which saves the poll.
        return receive_message(socket, zmq.NOBLOCK)
    except zmq.Again:
        if timeout_s == 0 or not socket.poll(None if timeout_s is None else int(1000 * timeout_s)):
            return None
    return receive_message(socket)


def bind_for_group(socket: "zmq.Socket[bytes]", address: str, keys: EngineKeys | None) -> str:
    """Bind a socket for the workers of an engine and return its address; `tcp://HOST:*` chooses a port.

    With keys, an `Authenticator` must run in the same context.

    Raises:
        ConfigError: other machines can reach the address, but there are no keys.
        StartupError: the address cannot be bound.
    """
    if not address.startswith("tcp://"):
        _bind(socket, address)
        return address
    prepare_listener(socket, address, keys)
    _bind(socket, address)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _bind(socket: "zmq.Socket[bytes]", address: str) -> None:
    path = ipc_path(address)
    if path and is_listening(path):
        socket.close(linger=0)
        raise StartupError(
            f"cannot bind {address}: another engine listens on it", hint="stop it, or choose another address"
        )
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise StartupError(
            f"cannot bind {address}: {error.strerror}", hint="check that the directory exists and is writable"
        ) from error
    if path:
        with contextlib.suppress(FileNotFoundError):
            path.chmod(0o600)


def _remove_file(address: str) -> None:
    """Remove the file of a closed socket, which zmq leaves behind."""
    if path := ipc_path(address):
        path.unlink(missing_ok=True)


def is_listening(path: Path) -> bool:
    """Return whether a live process listens on this socket. zmq itself would take over its address."""
    with socket_module.socket(socket_module.AF_UNIX, socket_module.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
