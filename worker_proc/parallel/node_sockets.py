"""Connects the first ranks of all nodes with one another.

Both ends prove that they know the secret of the group before anything else is exchanged: HMAC-SHA256 of a nonce, in
both directions. The rows that follow are neither encrypted nor authenticated, as with Gloo and NCCL.
"""

import hashlib
import hmac
import os
import socket
import time

from octavo.protocol.control import NodePlace
from octavo.protocol.errors import StartupError

TIMEOUT_S = 120.0
"""For all nodes to connect: they have been started at about the same time."""
_HANDSHAKE_S = 5.0
_RETRY_S = 0.05
_NONCE_BYTES = 32
_INDEX_BYTES = 4
_PROOF_BYTES = hashlib.sha256().digest_size


def connect_nodes(place: NodePlace) -> dict[int, socket.socket]:
    """Return a connection to each other node, by its index. Called by the first rank of every node.

    Blocks until: all are connected.

    Raises:
        StartupError: they are not after `TIMEOUT_S`.
    """
    deadline = time.monotonic() + TIMEOUT_S
    # A node connects to those before it, and waits for those after it.
    sockets = {other: _connect(place, other, deadline) for other in range(place.node)}
    with socket.socket(fileno=place.listener_fd) as listener:
        while len(sockets) < len(place.link_addresses) - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                raise _too_late(f"node {place.node} waits for a connection of another node") from None
            if (other := _admit(place, connection)) is not None:
                sockets[other] = connection
            else:
                connection.close()
    for connection in sockets.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
    return sockets


def _connect(place: NodePlace, other: int, deadline: float) -> socket.socket:
    host, _, port = place.link_addresses[other].rpartition(":")
    nonce = os.urandom(_NONCE_BYTES)
    index = place.node.to_bytes(_INDEX_BYTES, "little")
    while True:
        try:
            connection = socket.create_connection((host, int(port)), timeout=_HANDSHAKE_S)
            try:
                connection.settimeout(max(_HANDSHAKE_S, deadline - time.monotonic()))
                connection.sendall(nonce + index + _proof(place, b"connect", nonce, index))
                if hmac.compare_digest(_read(connection, _PROOF_BYTES), _proof(place, b"accept", nonce, index)):
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
            raise _too_late(f"node {place.node} cannot reach node {other} at {host}:{port}: {reason}")
        time.sleep(_RETRY_S)


def _admit(place: NodePlace, connection: socket.socket) -> int | None:
    """Return the node that has connected; None: a stranger has."""
    connection.settimeout(_HANDSHAKE_S)
    try:
        nonce, index = _read(connection, _NONCE_BYTES), _read(connection, _INDEX_BYTES)
        if not hmac.compare_digest(_read(connection, _PROOF_BYTES), _proof(place, b"connect", nonce, index)):
            return None
        connection.sendall(_proof(place, b"accept", nonce, index))
    except OSError:
        return None
    return int.from_bytes(index, "little")


def _proof(place: NodePlace, role: bytes, nonce: bytes, index: bytes) -> bytes:
    return hmac.digest(place.secret.encode(), role + nonce + index, "sha256")


def _read(connection: socket.socket, size: int) -> bytes:
    """Read exactly `size` bytes.

    Raises:
        OSError: the connection ends before.
    """
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the connection has ended")
        data += part
    return data


def _too_late(message: str) -> StartupError:
    return StartupError(
        f"{message} after {TIMEOUT_S:.0f} s",
        phase="joining the other workers",
        hint="nodes must reach each other on all TCP ports",
    )
