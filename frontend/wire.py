"""`Wire`: a connection to one core. It moves events and frames; the link interprets them."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import zmq
import zmq.utils.monitor

from octavo.frontend.loop_socket import LoopSocket, Slices
from octavo.protocol.channel import HIGH_WATER_MARK
from octavo.protocol.codec import Frame, event_codec, request_codec
from octavo.protocol.curve import ClientKeys, prepare_connection
from octavo.protocol.errors import ProtocolError, StartupError
from octavo.protocol.events import Event
from octavo.protocol.ids import RequestId
from octavo.protocol.log import LimitedLog
from octavo.protocol.requests import Abort

logger = logging.getLogger(__name__)

LINGER_MS = 200
"""Milliseconds that the last messages may take to be sent after the wire was closed."""

LAST_WORDS_S = 0.05
"""Seconds that the last message of a core that disappeared may still be in transit."""

RECONNECT_INTERVAL_MS = 20
"""Interval at which zmq retries an address where nothing listens, so that a restarted core is found soon."""

MAX_ABORTS = 1024
"""Number of requests that one message aborts: thousands of clients may disconnect at once."""

_FAULTS: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not know this client's key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it ends the connection, as it does without the right keys",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the process there does not accept clients with keys, or is not an engine",
}

_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | sum(_FAULTS)


class Wire:
    """A socket that connects, or keeps trying to, and a monitor that reports disconnects.

    Args:
        context: context of this process.
        address: where a core listens or will listen.
        on_event: called with every decoded message. May return work, which is done before the next message.
        on_lost: called once, shortly after the core has disconnected without a message.
        on_error: called with each exception that `on_event` raises.
        keys: for an address on another machine.

    Raises:
        StartupError: the address is invalid, or needs keys.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        on_event: Callable[[Event], Slices | None],
        on_lost: Callable[["Wire"], None],
        on_error: Callable[[Exception], None],
        keys: ClientKeys | None = None,
    ) -> None:
        self.fault = ""
        """Why the last connection attempt failed, if the other side reported a reason."""
        # Local sockets need no keys: if a core ends a handshake there, it has died during the handshake.
        self._may_need_keys = not address.startswith("ipc://")
        self._codec = event_codec()
        self._requests = request_codec()
        self._aborts: list[RequestId] = []
        """Request ids to abort in the next iteration of the loop."""
        self._malformed = LimitedLog(logger)
        self._on_event = on_event
        self._on_lost = on_lost
        self.has_met = False
        """Whether a process has accepted the connection. A core that is still loading accepts it but reads nothing."""
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_INTERVAL_MS)
        monitor = socket.get_monitor_socket(_WATCHED)
        try:
            prepare_connection(socket, address, keys)
            socket.connect(address)
        except (zmq.ZMQError, StartupError) as error:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close()
            if isinstance(error, StartupError):
                raise
            raise StartupError(
                f"cannot connect to {address!r}: {error.strerror}", hint="an address looks like ipc:///run/engine/core"
            ) from error
        self._zmq_socket = socket
        self._socket = LoopSocket(socket, self._receive, on_error)
        self._monitor = LoopSocket(monitor, self._on_connection_event, on_error)

    def send(self, frames: list[Frame]) -> None:
        """Send the frames of a message as soon as the core is connected."""
        self._socket.send(frames)

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        """Abort requests; those of one iteration of the event loop share a message."""
        if not self._aborts:
            asyncio.get_running_loop().call_soon(self._send_aborts)
        self._aborts += request_ids

    async def drain(self) -> None:
        """Wait until zmq has accepted all messages."""
        self._send_aborts()
        await self._socket.drain()

    def close(self, linger_ms: int | None = None) -> None:
        """Disconnect. Messages in zmq's queue are still sent within `linger_ms` (default: `LINGER_MS`)."""
        if not self._zmq_socket.closed:  # otherwise the context was destroyed meanwhile
            self._zmq_socket.disable_monitor()
        self._monitor.close(linger_ms=0)
        self._socket.close(linger_ms)

    def _send_aborts(self) -> None:
        while self._aborts:
            self.send(self._requests.encode(Abort(self._aborts[:MAX_ABORTS])))
            del self._aborts[:MAX_ABORTS]

    def _receive(self, frames: list[Frame]) -> Slices | None:
        try:
            event = self._codec.decode(*frames)
        except ProtocolError as error:
            self._malformed.warning("dropped a message from the engine: %s", error)
            return None
        return self._on_event(event)

    def _on_connection_event(self, frames: list[Frame]) -> None:
        """Handle connects and disconnects."""
        event = zmq.utils.monitor.parse_monitor_message([bytes(frame) for frame in frames])
        if self._may_need_keys:
            self.fault = _FAULTS.get(event["event"], self.fault)
        if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.has_met = True
        elif event["event"] == zmq.EVENT_DISCONNECTED:
            self._report_loss_later()

    def _report_loss_later(self) -> None:
        """Report the loss once the last messages, which may still be in the receive queue, are handled."""
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._report_loss)

    def _report_loss(self) -> None:
        if self._socket.is_behind:
            self._report_loss_later()
        else:
            self._on_lost(self)
