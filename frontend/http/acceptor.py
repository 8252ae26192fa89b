"""`Acceptor`: accepts connections in batches, those of health probes first.

asyncio's server accepts one connection per loop iteration, in order: behind two thousand others a probe would wait for
seconds. Of HTTP it knows how a probe's request begins, and one error response.
"""

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
from collections.abc import Callable

from octavo.frontend.http.errors import RETRY_AFTER_S, refusal
from octavo.frontend.http.throttle import Throttle
from octavo.protocol.log import LimitedLog

logger = logging.getLogger(__name__)

PROBES = (b"GET /health ", b"GET /ping ", b"HEAD /health ", b"HEAD /ping ", b"POST /ping ")
"""How requests begin that are answered before all others."""

MAX_ACCEPTED_AT_ONCE = 256

NUM_OTHER_FILES = 256
"""Files that this process needs for other things than callers."""

NUM_PROBES = 64
"""Callers that are let in above the limit because they probe: of what begins like a probe not all is one."""

MAX_UNREAD_PIECES = 16
"""Of what a refused caller has sent: so many, of 64 KiB, are taken to give the answer a chance."""

RETRY_S = 0.2
"""How long to wait when the system has no more files or memory for callers."""

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def is_probe(data: bytes) -> bool:
    """True for the beginning of a request that is answered before all others."""
    return data.startswith(PROBES)


def max_callers() -> int:
    """Return how many connections this process can have, after allowing itself as many files as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # not everywhere may it be as high as it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return 2**31 if soft == resource.RLIM_INFINITY else max(1, soft - NUM_OTHER_FILES)


class Acceptor:
    """Lets in the callers of one listening socket.

    Args:
        listening: the socket; stays its owner's.
        backlog: how many callers the system keeps waiting.
        make_protocol: for one caller.
        context: for TLS; None: without.
        throttle: decides when callers other than probes come in.
        num_callers: that are in.
        max_callers: above it callers are refused.
    """

    def __init__(
        self,
        listening: socket.socket,
        backlog: int,
        make_protocol: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext | None,
        throttle: Throttle,
        num_callers: Callable[[], int],
        max_callers: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._make_protocol = make_protocol
        self._context = context
        self._throttle = throttle
        self._num_callers = num_callers
        self._max_callers = max_callers
        self._waiting: set[socket.socket] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = LimitedLog(logger)
        self._retry: asyncio.TimerHandle | None = None
        self._is_open = True
        listening.setblocking(False)
        listening.listen(backlog)
        self._loop.add_reader(listening, self._accept)

    def is_serving(self) -> bool:
        """True until it is closed."""
        return self._is_open

    def close(self) -> None:
        """Let nobody in any more, those included that have not been let in yet; harmless the second time."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._listening)
            if self._retry is not None:
                self._retry.cancel()
            for caller in self._waiting:
                caller.close()
            self._waiting.clear()
            if self._context is not None:
                for task in self._tasks:  # who says nothing in the middle of a handshake would be waited for
                    task.cancel()

    async def wait_closed(self) -> None:
        """Wait for those who are just coming in."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTED_AT_ONCE):
            try:
                caller, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._log.warning("no more callers can be let in now: %s", error.strerror)
                self._loop.remove_reader(self._listening)
                self._retry = self._loop.call_later(RETRY_S, self._resume)
                return
            caller.setblocking(False)
            self._receive(caller)

    def _resume(self) -> None:
        self._loop.add_reader(self._listening, self._accept)

    def _receive(self, caller: socket.socket) -> None:
        num_callers = self._num_callers() + len(self._waiting) + len(self._tasks)
        is_first = self._context is None and is_probe(_first_bytes(caller))
        if num_callers >= self._max_callers + (NUM_PROBES if is_first else 0):
            self._refuse(caller)
        elif is_first:
            self._let_in(caller)
        else:
            self._waiting.add(caller)
            self._throttle.run(lambda: self._let_in(caller))

    def _let_in(self, caller: socket.socket) -> None:
        self._waiting.discard(caller)
        if self._is_open:
            task = self._loop.create_task(self._connect(caller))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, caller: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, caller, ssl=self._context)
        except OSError as error:  # it has left, or speaks no TLS (ssl.SSLError)
            logger.debug("a caller did not come in: %s", error)
            caller.close()

    def _refuse(self, caller: socket.socket) -> None:
        self._log.warning("refused a caller: %d connections are open, which is the limit", self._max_callers)
        if self._context is None:
            body = refusal(503, "too many connections are open; try again later").body
            head = (
                "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
                f"retry-after: {RETRY_AFTER_S}\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            with contextlib.suppress(OSError):
                caller.send(head.encode() + body)
                # Closed with something unread, the connection would be reset and the answer lost.
                for _ in range(MAX_UNREAD_PIECES):
                    if not caller.recv(65536):
                        break
        caller.close()


def _first_bytes(caller: socket.socket) -> bytes:
    """Return the beginning of what a caller has said, without taking it."""
    try:
        return caller.recv(max(map(len, PROBES)), socket.MSG_PEEK)
    except OSError:
        return b""
