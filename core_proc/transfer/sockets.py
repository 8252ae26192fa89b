"""Addresses at which engines find each other: a socket in a private directory of this user, and one for other
machines."""

import contextlib
import os
import socket
from pathlib import Path

import zmq

from octavo.protocol.errors import StartupError
from octavo.protocol.kv_transfer import KVTransfer

PART_BYTES = 4 << 20
"""Bytes requested at a time, covered by one checksum."""


def socket_directory(runtime_dir: Path) -> Path:
    """Return the directory for the sockets of this user's engines. Nobody else can access it.

    Raises:
        StartupError: the directory belongs to somebody else, or cannot be created.
    """
    path = runtime_dir / f"octavo-kv-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise _unusable(path, str(error)) from error
    if not path.is_dir() or path.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise _unusable(path, "others may use it")
    return path


def remove_dead_sockets(directory: Path) -> None:
    """Remove the sockets on which nobody listens."""
    for path in directory.iterdir():
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()


def address_of(transfer: KVTransfer, directory: Path) -> str:
    """Return the address of the engine that has the blocks."""
    return f"tcp://{transfer.host}:{transfer.port}" if transfer.host else local_address(directory, transfer.engine_id)


def local_address(directory: Path, engine_id: str) -> str:
    """Return the address of an engine on this machine and of this user."""
    return f"ipc://{directory / engine_id}"


GONE_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""Socket events: a connection has ended, or could not be established."""


def _unusable(path: Path, why: str) -> StartupError:
    return StartupError(
        f"kv_transfer_config: cannot use {path} for the sockets of engines: {why}",
        phase="binding sockets",
        hint="set XDG_RUNTIME_DIR to a directory of yours",
    )
