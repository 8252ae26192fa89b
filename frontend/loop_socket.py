"""A zmq socket on an event loop: messages arrive as callbacks, and sending never waits.

It moves frames and nothing else. zmq's own asyncio sockets create several futures per message, which costs more than
everything else about a short message.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import zmq

from octavo.protocol.channel import receive_message, send_message
from octavo.protocol.codec import Frame

MAX_RECEIVED_AT_ONCE = 32
"""Messages, or slices of long ones, handled before other callbacks run."""

MAX_SENT_AT_ONCE = 256
"""Messages sent before other callbacks run: about a millisecond."""

Slices: TypeAlias = Iterator[None]
"""The rest of the work on a long message: each step of the iterator does a small part of it."""

_END = object()


class LoopSocket:
    """Takes ownership of a connected socket. Call its methods only on the loop that is running when it is created.

    Args:
        socket: may have messages waiting already.
        on_message: called with the frames of each message; may return work that is done before the next message.
        on_error: called when `on_message` or its work raises, before the error goes to the loop's handler.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        on_message: Callable[[list[Frame]], Slices | None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._on_message = on_message
        self._on_error = on_error
        self._outbox: deque[list[Frame]] = deque()
        self._drained: asyncio.Future[None] | None = None
        self._slices: Slices | None = None
        self.is_behind = False
        """True while received messages may wait to be handled."""
        self._next_turn: asyncio.Handle | None = None
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._turn)
        self._schedule()

    def send(self, frames: list[Frame]) -> None:
        """Send a message in the next iteration of the event loop, together with all others of this one."""
        self._outbox.append(frames)
        self._schedule()

    async def drain(self) -> None:
        """Wait until zmq has taken everything."""
        if self._outbox:
            self._drained = self._drained or self._loop.create_future()
            await asyncio.shield(self._drained)

    def close(self, linger_ms: int | None = None) -> None:
        """Stop listening and close the socket, if its context has not done so; what zmq has taken still leaves."""
        self.is_behind = False
        self._loop.remove_reader(self._fd)
        if self._next_turn:
            self._next_turn.cancel()
        if not self._socket.closed:
            self._socket.close(linger_ms)

    def _schedule(self) -> None:
        if self._next_turn is None:
            self._next_turn = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Send and receive as much as can be, up to the limits for one iteration of the loop.

        zmq's descriptor becomes readable once for a change, and any call may consume that event. So a
        caller that is woken checks everything.
        """
        if self._next_turn:
            self._next_turn.cancel()
            self._next_turn = None
        if self._socket.closed:
            return
        self._send_some()
        self.is_behind = not self._receive_some()
        if self.is_behind or (self._outbox and self._can_go_on()):
            self._schedule()

    def _send_some(self) -> None:
        for _ in range(min(len(self._outbox), MAX_SENT_AT_ONCE)):
            try:
                send_message(self._socket, self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._outbox.popleft()
        if self._drained and not self._outbox:
            self._drained.set_result(None)
            self._drained = None

    def _receive_some(self) -> bool:
        """Hand messages on; False when there may be more."""
        for _ in range(MAX_RECEIVED_AT_ONCE):
            frames: list[Frame] = []
            if self._slices is None:
                try:
                    frames = receive_message(self._socket, zmq.NOBLOCK)
                except zmq.Again:
                    return True
            try:
                self._handle(frames)
            except Exception as error:
                self._slices = None
                self._schedule()  # further messages may wait
                self._on_error(error)
                raise
            if self._socket.closed:
                return True
        return False

    def _handle(self, frames: list[Frame]) -> None:
        """Go on with the message that is being handled, or begin with the next one."""
        if self._slices is None:
            self._slices = self._on_message(frames)
        elif next(self._slices, _END) is _END:
            self._slices = None

    def _can_go_on(self) -> bool:
        """Tell whether there is room for the outbox, or a message that came meanwhile: asking swallows its sign."""
        events: Any = self._socket.getsockopt(zmq.EVENTS)
        return bool(events & (zmq.POLLOUT | zmq.POLLIN))
