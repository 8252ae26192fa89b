"""A zmq socket that lives on an event loop: messages come as calls, and sending never waits.

Moves frames and nothing else. zmq's own asyncio sockets make several futures for each message, which costs
more than all the rest of a short message's way.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

MAX_RECEIVED_AT_ONCE = 32
"""Messages handed on before others get a turn of the loop."""


class LoopSocket:
    """Owns a connected socket from now on. Call everything on the loop that is running when it is made.

    Args:
        socket: may have messages waiting already.
        on_message: called with the frames of each message.
        on_error: called when `on_message` raises, before the error goes to the loop's handler.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        on_message: Callable[[list[bytes]], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._on_message = on_message
        self._on_error = on_error
        self._outbox: deque[list[bytes]] = deque()
        self._drained: asyncio.Future[None] | None = None
        self._next_turn: asyncio.Handle | None = None
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._turn)
        self._schedule()

    def send(self, frames: list[bytes]) -> None:
        """Send a message in the next turn of the loop, together with all others of this one."""
        self._outbox.append(frames)
        self._schedule()

    async def drain(self) -> None:
        """Wait until zmq has taken everything."""
        if self._outbox:
            self._drained = self._drained or self._loop.create_future()
            await asyncio.shield(self._drained)

    def close(self, linger_ms: int | None = None) -> None:
        """Stop listening and close the socket, if its context has not done so; what zmq has taken still leaves."""
        self._loop.remove_reader(self._fd)
        if self._next_turn:
            self._next_turn.cancel()
        if not self._socket.closed:
            self._socket.close(linger_ms)

    def _schedule(self) -> None:
        if self._next_turn is None:
            self._next_turn = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Send and receive as much as can be.

        zmq's descriptor becomes readable once for a change, and any call may swallow it: so whoever is
        woken looks at everything.
        """
        if self._next_turn:
            self._next_turn.cancel()
            self._next_turn = None
        if self._socket.closed:
            return
        self._send_all()
        if not self._receive_some() or (self._outbox and self._can_go_on()):
            self._schedule()

    def _send_all(self) -> None:
        while self._outbox:
            try:
                self._socket.send_multipart(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._outbox.popleft()
        if self._drained:
            self._drained.set_result(None)
            self._drained = None

    def _receive_some(self) -> bool:
        """Hand messages on; False when there may be more."""
        for _ in range(MAX_RECEIVED_AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            try:
                self._on_message(frames)
            except Exception as error:
                self._on_error(error)
                raise
            if self._socket.closed:
                return True
        return False

    def _can_go_on(self) -> bool:
        """Tell whether there is room for the outbox, or a message that came meanwhile: asking swallows its sign."""
        events: Any = self._socket.getsockopt(zmq.EVENTS)
        return bool(events & (zmq.POLLOUT | zmq.POLLIN))
