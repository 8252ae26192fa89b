"""`Acceptor`: accepts connections in batches, health probes first.

asyncio's server accepts one connection per loop iteration, in order. A probe behind two thousand other connections
would wait for seconds. The only HTTP in this module is one error response.
"""

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
from collections.abc import Callable

from octavo.frontend.http.errors import RETRY_AFTER_S, rejection
from octavo.frontend.http.throttle import Throttle, first_bytes, is_probe
from octavo.protocol.log import LimitedLog

logger = logging.getLogger(__name__)

FIRST_REQUEST_S = 60
"""Seconds that a new connection may stay silent."""

MAX_ACCEPTED_AT_ONCE = 256

NUM_OTHER_FILES = 256
"""File descriptors that this process needs for purposes other than connections."""

NUM_PROBES = 64
"""Probe connections accepted above the connection limit. Bounded, because any client can send a request that begins
like a probe."""

MAX_UNREAD_PIECES = 16
"""Maximum number of 64 KiB reads from a rejected client. Closing a socket with unread data would discard the
response."""

RETRY_S = 0.2
"""Delay in seconds before we accept again after the system ran out of file descriptors or memory."""

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def connection_limit() -> int:
    """Raise the soft limit on open files as far as possible, and return how many connections it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems reject their own hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return 2**31 if soft == resource.RLIM_INFINITY else max(1, soft - NUM_OTHER_FILES)


class Acceptor:
    """Accept the connections of one listening socket.

    Args:
        listening: the socket; the owner closes it.
        backlog: connections that the system keeps in its queue.
        make_protocol: creates the protocol of a connection from its socket.
        context: the TLS context; None: no TLS.
        throttle: decides when to set up a connection that has sent its first bytes.
        num_connections: returns the number of open connections.
        max_connections: maximum number of open connections; further connections are rejected.
    """

    def __init__(
        self,
        listening: socket.socket,
        backlog: int,
        make_protocol: Callable[[socket.socket], asyncio.Protocol],
        context: ssl.SSLContext | None,
        throttle: Throttle,
        num_connections: Callable[[], int],
        max_connections: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._make_protocol = make_protocol
        self._context = context
        self._throttle = throttle
        self._num_connections = num_connections
        self._max_connections = max_connections
        self._waiting: dict[socket.socket, asyncio.TimerHandle] = {}
        """Connections that have sent nothing yet or wait for the throttle, with their timeouts."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = LimitedLog(logger)
        self._retry: asyncio.TimerHandle | None = None
        self._is_open = True
        listening.setblocking(False)
        listening.listen(backlog)
        self._loop.add_reader(listening, self._accept)

    def is_serving(self) -> bool:
        """True until the acceptor is closed."""
        return self._is_open

    def close(self) -> None:
        """Stop accepting, and drop the connections that are not set up yet. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._listening)
            if self._retry is not None:
                self._retry.cancel()
            for client_socket in list(self._waiting):
                self._drop(client_socket)
            if self._context is not None:
                for task in self._tasks:  # a client that is silent during the TLS handshake must not delay this
                    task.cancel()

    async def wait_closed(self) -> None:
        """Wait for the connections that are being set up."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTED_AT_ONCE):
            try:
                client_socket, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._log.warning("cannot accept connections now: %s; retrying", error.strerror)
                self._loop.remove_reader(self._listening)
                self._retry = self._loop.call_later(RETRY_S, self._resume)
                return
            client_socket.setblocking(False)
            self._receive(client_socket)

    def _resume(self) -> None:
        self._loop.add_reader(self._listening, self._accept)

    def _receive(self, client_socket: socket.socket) -> None:
        num_connections = self._num_connections() + len(self._waiting) + len(self._tasks)
        is_first = self._context is None and is_probe(first_bytes(client_socket))
        if num_connections >= self._max_connections + (NUM_PROBES if is_first else 0):
            self._reject(client_socket)
            return
        self._waiting[client_socket] = self._loop.call_later(FIRST_REQUEST_S, self._drop_silent, client_socket)
        if is_first:
            self._set_up(client_socket)
        else:
            self._throttle.watch(client_socket, lambda: self._set_up(client_socket))

    def _set_up(self, client_socket: socket.socket) -> None:
        if timeout := self._waiting.pop(client_socket, None):  # otherwise the connection was dropped
            timeout.cancel()
            task = self._loop.create_task(self._connect(client_socket))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _drop_silent(self, client_socket: socket.socket) -> None:
        if not first_bytes(client_socket):  # otherwise the connection waits for its turn
            self._drop(client_socket)

    def _drop(self, client_socket: socket.socket) -> None:
        self._waiting.pop(client_socket).cancel()
        self._throttle.forget(client_socket)
        client_socket.close()

    async def _connect(self, client_socket: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make_protocol(client_socket), client_socket, ssl=self._context
            )
        except OSError as error:  # the client has disconnected, or does not speak TLS (ssl.SSLError)
            logger.debug("a connection failed before its first request: %s", error)
            client_socket.close()

    def _reject(self, client_socket: socket.socket) -> None:
        self._log.warning("rejected a connection: %d are open, which is the limit", self._max_connections)
        if self._context is None:
            body = rejection(503, "too many connections are open; try again later").body
            head = (
                "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
                f"retry-after: {RETRY_AFTER_S}\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            with contextlib.suppress(OSError):
                client_socket.send(head.encode() + body)
                # Closing a socket with unread data resets the connection, and the client loses the response.
                for _ in range(MAX_UNREAD_PIECES):
                    if not client_socket.recv(65536):
                        break
        client_socket.close()
