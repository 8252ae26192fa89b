"""A zmq socket on an event loop: messages arrive as callbacks, and sending never waits.

It only moves frames. zmq's own asyncio sockets create several futures per message, which costs more than all other work
on a short message.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import zmq

from octavo.protocol.channel import receive_message, send_message
from octavo.protocol.codec import Frame

MAX_RECEIVED_AT_ONCE = 32
"""Number of messages, or slices of long ones, handled before other callbacks run."""

MAX_SENT_AT_ONCE = 256
"""Number of messages sent before other callbacks run: about a millisecond of work."""

Slices: TypeAlias = Iterator[None]
"""The remaining work on a long message: each step of the iterator does a small part of it."""

_END = object()


class LoopSocket:
    """Takes ownership of a connected socket. Create it and call its methods on the same running event loop.

    Args:
        socket: may already have received messages.
        on_message: called with the frames of each message. May return work, which is done before the next message.
        on_error: called when `on_message` or its work raises, before the loop's exception handler.
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
        """Whether received messages may be waiting to be handled."""
        self._next_turn: asyncio.Handle | None = None
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._turn)
        self._schedule()

    def send(self, frames: list[Frame]) -> None:
        """Send a message in the next iteration of the event loop, together with all others sent in this one."""
        self._outbox.append(frames)
        self._schedule()

    async def drain(self) -> None:
        """Wait until zmq has accepted all messages."""
        if self._outbox:
            self._drained = self._drained or self._loop.create_future()
            await asyncio.shield(self._drained)

    def close(self, linger_ms: int | None = None) -> None:
        """Stop listening and close the socket, unless its context has. Messages that zmq has accepted are still
        sent.
        """
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
        """Send and receive as much as possible, up to the limits for one iteration of the loop.

        zmq's descriptor becomes readable once per change, and any zmq call may consume that event. So every wake-up
        checks for both directions.
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
        """Handle received messages. Return `False` if there may be more."""
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
                self._schedule()  # further messages may be waiting
                self._on_error(error)
                raise
            if self._socket.closed:
                return True
        return False

    def _handle(self, frames: list[Frame]) -> None:
        """Continue with the message that is being handled, or begin with the next one."""
        if self._slices is None:
            self._slices = self._on_message(frames)
        elif next(self._slices, _END) is _END:
            self._slices = None

    def _can_go_on(self) -> bool:
        """Return whether the outbox can be sent or a message has arrived. Asking consumes the descriptor's event."""
        events: Any = self._socket.getsockopt(zmq.EVENTS)
        return bool(events & (zmq.POLLOUT | zmq.POLLIN))
