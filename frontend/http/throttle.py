"""`Throttle`: limits how much arrived work starts in one iteration of the event loop; health probes come first.

Ten thousand clients may connect, send a request or disconnect at once. An event loop handles every ready socket in the
same iteration, and probes, the engine's events and responses would wait for seconds. So the sockets are watched here,
and the loop reads each in its turn. All that this module knows of HTTP is how a probe's request begins.
"""

import asyncio
import select
import socket
from collections import deque
from collections.abc import Callable

MAX_AT_ONCE = 4
"""Pieces of work per iteration: some milliseconds, because each may start or cancel a request."""

MAX_FOUND_AT_ONCE = 512
"""Ready sockets found per iteration: about a millisecond. More than are handled, because one may have a probe."""

PROBES = (b"GET /health ", b"GET /ping ", b"HEAD /health ", b"HEAD /ping ", b"POST /ping ")
"""Beginnings of requests that are answered before all others."""

_MAX_PROBE_BYTES = max(map(len, PROBES))
_ARRIVED = select.EPOLLIN | select.EPOLLRDHUP


def is_probe(data: bytes) -> bool:
    """True for the beginning of a request that is answered before all others."""
    return data.startswith(PROBES)


def first_bytes(caller: socket.socket) -> bytes:
    """Return the first bytes that a client has sent and nobody has read, without consuming them."""
    try:
        return caller.recv(_MAX_PROBE_BYTES, socket.MSG_PEEK)
    except OSError:  # it has sent nothing, or is gone
        return b""


class Throttle:
    """Runs work at once while there is little, and in order, `MAX_AT_ONCE` per iteration, when there is much.

    All calls must come from the loop that runs when it is created.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Callable[[], object]] = deque()
        self._num_done = 0
        """In this iteration."""
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[socket.socket, Callable[[], object]]] = {}
        self._loop.add_reader(self._epoll.fileno(), self._find_ready)

    def run(self, work: Callable[[], object]) -> None:
        """Do `work` now or in one of the next iterations, after everything that came before it."""
        self._queue.append(work)
        self._run_some()

    def watch(self, caller: socket.socket, work: Callable[[], object]) -> None:
        """Run `work` once, when a client has sent data or is gone; run it at once if the data are a probe's.

        The socket must be forgotten before it is closed, or watched again.
        """
        if self._epoll.closed:
            return
        self._epoll.register(caller, _ARRIVED)
        self._watched[caller.fileno()] = caller, work

    def forget(self, caller: socket.socket) -> None:
        """Stop watching a socket, if it is still watched. Its work may be queued already."""
        if self._watched.pop(caller.fileno(), None):
            self._epoll.unregister(caller)

    def close(self) -> None:
        """Watch no socket any more: the server has ended."""
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        self._watched.clear()

    def _find_ready(self) -> None:
        probes: list[Callable[[], object]] = []
        for fd, _ in self._epoll.poll(0, MAX_FOUND_AT_ONCE):
            self._epoll.unregister(fd)
            caller, work = self._watched.pop(fd)
            (probes if is_probe(first_bytes(caller)) else self._queue).append(work)
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
