"""Connects the first ranks of all nodes with one another.

Both ends prove that they know the secret of the group before anything else is exchanged: HMAC-SHA256 of a nonce of each
side and of both nodes, so a recorded proof cannot be replayed later or elsewhere. The rows that follow are neither
encrypted nor authenticated, as with Gloo and NCCL.
"""

import hashlib
import hmac
import os
import socket
import time

from octavo.protocol.control import NodePlace
from octavo.protocol.errors import StartupError

TIMEOUT_S = 120.0
"""Seconds for all nodes to connect: they are started at about the same time."""
HANDSHAKE_S = 5.0
"""Seconds for a peer to prove that it belongs to the group; others wait meanwhile."""
_RETRY_S = 0.05
_NONCE_BYTES = 32
_INDEX_BYTES = 4
_PROOF_BYTES = hashlib.sha256().digest_size
_KEEPALIVE_S = 30
"""Firewalls drop connections that are idle for minutes, such as those of an engine without requests."""


def connect_nodes(place: NodePlace) -> dict[int, socket.socket]:
    """Return a connection to each other node, by its index. Called by the first rank of every node.

    Blocks until all are connected.

    Raises:
        StartupError: a node has not connected after `TIMEOUT_S`.
    """
    deadline = time.monotonic() + TIMEOUT_S
    # A node connects to lower indices, and waits for higher ones.
    sockets = {other: _connect(place, other, deadline) for other in range(place.node)}
    with socket.socket(fileno=place.listener_fd) as listener:
        while len(sockets) < len(place.link_addresses) - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                raise _timeout_error(f"node {place.node} waits for a connection of another node") from None
            if (other := _admit(place, connection)) is None:
                connection.close()
            else:
                if other in sockets:  # the peer has given up the earlier connection
                    sockets[other].close()
                sockets[other] = connection
            if time.monotonic() >= deadline and len(sockets) < len(place.link_addresses) - 1:
                raise _timeout_error(f"node {place.node} waits for a connection of another node")
    for connection in sockets.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
        connection.settimeout(None)
    return sockets


def _connect(place: NodePlace, other: int, deadline: float) -> socket.socket:
    host, _, port = place.link_addresses[other].rpartition(":")
    while True:
        try:
            connection = socket.create_connection((host, int(port)), timeout=HANDSHAKE_S)
            try:
                # The other node may first connect to lower indices.
                if _introduce(place, other, connection, max(time.monotonic() + HANDSHAKE_S, deadline)):
                    return connection
            except BaseException:
                connection.close()
                raise
            connection.close()
        except OSError as error:
            reason = str(error)
        else:
            reason = "it does not know the secret of this group"
        if time.monotonic() >= deadline:
            raise _timeout_error(f"node {place.node} cannot reach node {other} at {host}:{port}: {reason}")
        time.sleep(_RETRY_S)


def _introduce(place: NodePlace, other: int, connection: socket.socket, deadline: float) -> bool:
    """Prove to another node that this one belongs to the group. Return whether the other node does.

    Raises:
        OSError: the peer does not answer, or rejects this one.
    """
    challenge = _read(connection, _NONCE_BYTES, deadline)
    nonce, index = os.urandom(_NONCE_BYTES), place.node.to_bytes(_INDEX_BYTES, "little")
    transcript = challenge + nonce + index + other.to_bytes(_INDEX_BYTES, "little")
    connection.sendall(nonce + index + _proof(place, b"connect", transcript))
    return hmac.compare_digest(_read(connection, _PROOF_BYTES, deadline), _proof(place, b"accept", transcript))


def _admit(place: NodePlace, connection: socket.socket) -> int | None:
    """Return the node that has connected; `None` if it does not belong to the group."""
    deadline = time.monotonic() + HANDSHAKE_S
    challenge = os.urandom(_NONCE_BYTES)
    try:
        connection.settimeout(HANDSHAKE_S)
        connection.sendall(challenge)
        nonce, index = _read(connection, _NONCE_BYTES, deadline), _read(connection, _INDEX_BYTES, deadline)
        transcript = challenge + nonce + index + place.node.to_bytes(_INDEX_BYTES, "little")
        if not hmac.compare_digest(_read(connection, _PROOF_BYTES, deadline), _proof(place, b"connect", transcript)):
            return None
        connection.sendall(_proof(place, b"accept", transcript))
    except OSError:
        return None
    node = int.from_bytes(index, "little")
    return node if place.node < node < len(place.link_addresses) else None


def _proof(place: NodePlace, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(place.secret.encode(), role + transcript, "sha256")


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Read exactly `size` bytes.

    Raises:
        OSError: the connection ends early, or the bytes have not arrived at the deadline.
    """
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the connection has ended")
        data += part
    return data


def _timeout_error(message: str) -> StartupError:
    return StartupError(
        f"{message} after {TIMEOUT_S:.0f} s",
        phase="joining the other workers",
        hint="nodes must reach each other on all TCP ports, and all compute with the same --cpu-kernels",
    )
