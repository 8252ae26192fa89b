"""`Throttle`: limits how much new work starts per iteration of the event loop; health probes come first.

Ten thousand clients may connect, send a request or disconnect at the same time. An event loop would handle every ready
socket in the same iteration, while probes, the engine's events and responses wait for seconds. So this module watches
the sockets, and the loop reads them in turn. The only HTTP here is the beginning of a probe's request.
"""

import asyncio
import select
import socket
from collections import deque
from collections.abc import Callable

MAX_AT_ONCE = 4
"""Work items per iteration. They take some milliseconds, because each may start or cancel a request."""

MAX_FOUND_AT_ONCE = 512
"""Ready sockets found per iteration: takes about a millisecond. More than are handled, because one may have a probe."""

PROBES = (b"GET /health ", b"GET /ping ", b"HEAD /health ", b"HEAD /ping ", b"POST /ping ")
"""First bytes of requests that are handled before all others."""

_MAX_PROBE_BYTES = max(map(len, PROBES))
_ARRIVED = select.EPOLLIN | select.EPOLLRDHUP


def is_probe(data: bytes) -> bool:
    """Return whether data begin a request that is handled before all others."""
    return data.startswith(PROBES)


def first_bytes(client_socket: socket.socket) -> bytes:
    """Return the first bytes that a client has sent and nobody has read, without consuming them."""
    try:
        return client_socket.recv(_MAX_PROBE_BYTES, socket.MSG_PEEK)
    except OSError:  # nothing was sent, or the client has disconnected
        return b""


class Throttle:
    """Runs work at once under low load. Under high load it runs work in order, `MAX_AT_ONCE` items per iteration.

    All calls must come from the event loop that runs when the throttle is created.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Callable[[], object]] = deque()
        self._num_done = 0
        """Number of work items done in this iteration."""
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[socket.socket, Callable[[], object]]] = {}
        self._loop.add_reader(self._epoll.fileno(), self._find_ready)

    def run(self, work: Callable[[], object]) -> None:
        """Run `work` now or in one of the next iterations, after all earlier work."""
        self._queue.append(work)
        self._run_some()

    def watch(self, client_socket: socket.socket, work: Callable[[], object]) -> None:
        """Run `work` once, when a client has sent data or disconnected; at once if the data are a probe's.

        Call `forget` before the socket is closed or watched again.
        """
        if self._epoll.closed:
            return
        self._epoll.register(client_socket, _ARRIVED)
        self._watched[client_socket.fileno()] = client_socket, work

    def forget(self, client_socket: socket.socket) -> None:
        """Stop watching a socket, if it is still watched. Its work may already be queued."""
        if self._watched.pop(client_socket.fileno(), None):
            self._epoll.unregister(client_socket)

    def close(self) -> None:
        """Stop watching all sockets: the server has ended."""
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        self._watched.clear()

    def _find_ready(self) -> None:
        probes: list[Callable[[], object]] = []
        for fd, _ in self._epoll.poll(0, MAX_FOUND_AT_ONCE):
            self._epoll.unregister(fd)
            client_socket, work = self._watched.pop(fd)
            (probes if is_probe(first_bytes(client_socket)) else self._queue).append(work)
        for work in probes:
            work()
        self._run_some()

    def _run_some(self) -> None:
        while self._queue and self._num_done < MAX_AT_ONCE:
            if self._num_done == 0:
                self._loop.call_soon(self._on_next_turn)
            self._num_done += 1
            self._queue.popleft()()

    def _on_next_turn(self) -> None:
        self._num_done = 0
        self._run_some()
