"""`Wire`: one connection to one life of a core. Moves events and frames; what they mean is the link's business."""

import asyncio
import logging
from collections.abc import Callable

import zmq
import zmq.utils.monitor

from octavo.frontend.loop_socket import LoopSocket
from octavo.protocol.channel import HIGH_WATER_MARK, only_frame
from octavo.protocol.codec import event_codec
from octavo.protocol.curve import ClientKeys, prepare_connection
from octavo.protocol.errors import ProtocolError, StartupError
from octavo.protocol.events import Event
from octavo.protocol.log import LimitedLog

logger = logging.getLogger(__name__)

LINGER_MS = 200
"""How long what was sent last may take to leave after the wire was closed."""

LAST_WORDS_S = 0.1
"""How long a vanished core's last message may still be on its way."""

RECONNECT_INTERVAL_MS = 20
"""How often zmq tries an address where nobody listens: a core that is being started again is soon found."""

_FAULTS: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not know this client's key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it ends the connection, as it does without the right keys",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "what listens there does not speak to clients with such keys, or is no engine",
}

_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | sum(_FAULTS)


class Wire:
    """A socket that is connected, or tries to be, and a watch for its loss.

    Args:
        context: of this process.
        address: where a core listens or will listen.
        on_event: gets every message that can be read.
        on_lost: called once, a moment after the core has gone from the other end without a word.
        on_error: called with whatever `on_event` raises.
        keys: for an address on another machine.

    Raises:
        StartupError: that is no address, or one that needs keys.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        on_event: Callable[[Event], None],
        on_lost: Callable[["Wire"], None],
        on_error: Callable[[Exception], None],
        keys: ClientKeys | None = None,
    ) -> None:
        self.fault = ""
        """Why the last attempt to connect failed, if the other end has said so."""
        # On this machine no keys are needed: a core that ends a handshake there has died in the middle of it.
        self._may_need_keys = not address.startswith("ipc://")
        self._codec = event_codec()
        self._malformed = LimitedLog(logger)
        self._on_event = on_event
        self._on_lost = on_lost
        self.has_met = False
        """Whether there has been a process at the other end; one that still loads hears nothing yet."""
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
                f"cannot connect to {address!r}: {error.strerror}",
                phase="connecting",
                hint="an address looks like ipc:///run/engine/core",
            ) from error
        self._zmq_socket = socket
        self._socket = LoopSocket(socket, self._receive, on_error)
        self._monitor = LoopSocket(monitor, self._on_connection_event, on_error)

    def send(self, frame: bytes) -> None:
        """Send a message, as soon as there is somebody."""
        self._socket.send([frame])

    async def drain(self) -> None:
        """Wait until zmq has taken everything."""
        await self._socket.drain()

    def close(self, linger_ms: int | None = None) -> None:
        """Disconnect; what zmq has taken still leaves within `linger_ms`, by default a moment."""
        if not self._zmq_socket.closed:  # else the whole context was destroyed meanwhile
            self._zmq_socket.disable_monitor()
        self._monitor.close(linger_ms=0)
        self._socket.close(linger_ms)

    def _receive(self, frames: list[bytes]) -> None:
        try:
            event = self._codec.decode(only_frame(frames))
        except ProtocolError as error:
            self._malformed.warning("dropped a message from the engine: %s", error)
        else:
            self._on_event(event)

    def _on_connection_event(self, frames: list[bytes]) -> None:
        """Notice a core that is there, and one that is gone without a word."""
        event = zmq.utils.monitor.parse_monitor_message(frames)
        if self._may_need_keys:
            self.fault = _FAULTS.get(event["event"], self.fault)
        if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.has_met = True
        elif event["event"] == zmq.EVENT_DISCONNECTED:
            # Its last words, if it had any, lie in the receive queue.
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._on_lost, self)
