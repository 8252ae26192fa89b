"""The server's listening sockets, bound before any model is loaded. `acceptor.py` accepts connections."""

import errno
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.frontend.http.tls import check_tls
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import StartupError

BACKLOG = 2048


@dataclass(frozen=True)
class Listener:
    """Listening sockets, one per HTTP process. A socket's queue holds clients that connect before its process is ready.

    The kernel distributes the connections to a port among its sockets. This process keeps all of them open, so the
    replacement of a process that died serves its queue.
    """

    sockets: tuple[socket.socket, ...]
    url: str
    """URL of the server: `http://host:port`, `https://host:port` or `unix:PATH`."""
    path: Path | None = None
    """Path of a Unix socket; `None` for TCP."""

    @property
    def socket(self) -> socket.socket:
        """The listening socket of this process."""
        return self.sockets[0]

    def close(self) -> None:
        """Stop listening, and remove the file of a Unix socket. Idempotent."""
        for one in self.sockets:
            one.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def listen(config: ServerConfig) -> Listener:
    """Bind the configured address.

    Raises:
        StartupError: the address is in use or cannot be bound, or the TLS files are invalid.
    """
    scheme = "https" if check_tls(config) else "http"
    if config.uds is not None:
        return _listen_unix(Path(config.uds), config.api_server_count)
    try:
        family, _, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sockets = _bind_tcp(family, address, config.api_server_count)
    except OSError as error:
        raise _bind_error(f"{config.host}:{config.port}", error) from None
    port = sockets[0].getsockname()[1]
    host = f"[{config.host}]" if family == socket.AF_INET6 else config.host
    return Listener(sockets, f"{scheme}://{host}:{port}")


def _bind_tcp(family: int, address: Any, count: int) -> tuple[socket.socket, ...]:
    """Return `count` sockets that share one port.

    Raises:
        OSError: the port is in use.
    """
    first = socket.create_server(address, family=family, backlog=BACKLOG)
    if count == 1:
        return (first,)
    # The bind without SO_REUSEPORT has proved that no other program uses the port. Now share it.
    host, _, *rest = first.getsockname()
    address = (host, first.getsockname()[1], *rest)
    first.close()
    return tuple(socket.create_server(address, family=family, backlog=BACKLOG, reuse_port=True) for _ in range(count))


def _listen_unix(path: Path, count: int) -> Listener:
    _remove_stale(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Set the mode at creation: with a later chmod the socket would be open to others for a moment.
    mask = os.umask(0o177)
    try:
        bound.bind(str(path))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise _bind_error(str(path), error) from None
    finally:
        os.umask(mask)
    # All processes share one queue, since Unix sockets cannot share a path.
    return Listener((bound,) * count, f"unix:{path}", path)


def _remove_stale(path: Path) -> None:
    """Remove the socket file of a dead server, and nothing else.

    Raises:
        StartupError: a server listens on the socket, or the path is not a socket.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartupError(f"{path} exists and is not a socket", hint="choose another --uds path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise _bind_error(str(path), OSError(errno.EADDRINUSE, ""))


def _bind_error(address: str, error: OSError) -> StartupError:
    reasons = {
        errno.EADDRINUSE: ("is in use by another program", "choose another --port or --uds, or stop that program"),
        errno.EACCES: ("may not be used by this user", "choose a --port above 1023, or another --uds"),
        errno.ENOENT: ("is in a directory that does not exist", "create it, or choose another --uds"),
        errno.EADDRNOTAVAIL: ("is not an address of this machine", "use --host 127.0.0.1 or 0.0.0.0"),
    }
    reason, hint = reasons.get(error.errno or 0, (f"cannot be bound: {error.strerror or error}", "check --host"))
    return StartupError(f"{address} {reason}", hint=hint)
