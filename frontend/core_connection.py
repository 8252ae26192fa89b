"""The connection to an engine's core, which survives the replacement of the core. `link.py` sends requests over it.

It does not handle requests and starts no cores. It belongs to one event loop; call every method on that loop.
"""

import asyncio
import logging
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

import zmq

from octavo.frontend.loop_socket import Slices
from octavo.frontend.metrics.observer import RestartCause
from octavo.frontend.recovery.downtime import Downtime, ReconnectPolicy, Resumption
from octavo.frontend.wire import Wire
from octavo.protocol.channel import MAX_FRAME_BYTES
from octavo.protocol.codec import Frame, request_codec
from octavo.protocol.curve import ClientKeys
from octavo.protocol.errors import EngineDeadError, InvalidRequestError, ProtocolError, StartupError
from octavo.protocol.events import EngineDying, EngineFacts, Event, Refused, Welcome
from octavo.protocol.requests import Connect, FrontendMessage

logger = logging.getLogger(__name__)

FRONTEND_ID_BYTES = 16

WRONG_ENGINE_DELAY_S = 0.05
"""Delay before the next attempt when another engine answers for the first time; it doubles with each further time."""

MAX_WRONG_ENGINE_DELAY_S = 1.0

_GONE = "the engine's core process is gone"


class CoreConnection(ABC):
    """A frontend's connection to an engine; it outlives the engine's cores.

    Args:
        context: context of this process.
        address: where the core listens.
        keys: needed for a core on another machine.
    """

    facts: EngineFacts
    """What the latest core reported about itself."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: ClientKeys | None = None) -> None:
        self._keys = keys
        self._frontend_id = os.urandom(FRONTEND_ID_BYTES)
        self.address = address
        self.index = 0
        """Index of the engine among the engines of a client."""
        self.on_resumed: Callable[[Resumption], None] = lambda resumption: None
        """Called when another core has taken over."""
        self.on_lost: Callable[[], bool] = lambda: False
        """Called when the core has died. Returns `True` if other engines take over the requests, at once or later. In
        that case `fail_rest` is called in the end if this engine has failed for good."""
        self.on_down: Callable[[], None] = lambda: None
        """Called, before `on_lost`, when there is no core any more, even if it is about to be replaced."""
        self.on_up: Callable[[], None] = lambda: None
        """Called when a core is up again, the same or another one."""
        self.accepts: Callable[[EngineFacts], bool] = lambda facts: True
        """Whether the core that answers after a downtime belongs to this engine: another may have its address."""
        self.reconnect_policy = ReconnectPolicy()
        self.failure: EngineDeadError | None = None
        """Why no request can be served any more. `None` while the engine lives."""
        self.downtime: Downtime | None = None
        """Set while no core is up but another one may come."""
        self.last_words = ""
        """Why the core is about to exit, if it sent a reason."""
        self.num_heard = 0
        """Number of messages received from cores so far."""
        self._context = context
        self._wrong_engine_delay_s = WRONG_ENGINE_DELAY_S
        self._giving_up: asyncio.TimerHandle | None = None
        self._welcome: asyncio.Future[EngineFacts] = asyncio.get_running_loop().create_future()
        self._requests = request_codec()
        self._wire = self._open_wire()

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """Number of requests that a new core has to be sent, for the log."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnect. Idempotent."""

    @abstractmethod
    def _handle(self, event: Event) -> Slices | None:
        """Handle a message about requests, calls or counters; return the remaining work, as `_receive` does."""

    @abstractmethod
    def _suspend(self, cause: str) -> None:
        """Prepare all requests and calls for the next core."""

    @abstractmethod
    def _continue(self, *, is_another: bool) -> Slices:
        """Send all unfinished requests and calls to the core that is up now; return as `_receive` does.

        Args:
            is_another: whether it is a new core; `False`: the old core was only unreachable.
        """

    @abstractmethod
    def _on_failed(self, failure: EngineDeadError) -> None:
        """Fail all requests and calls: there will be no other core."""

    @classmethod
    async def connect(
        cls, context: "zmq.Context[zmq.Socket[bytes]]", address: str, timeout_s: float, keys: ClientKeys | None = None
    ) -> Self:
        """Connect to the core that listens on `address`, with `keys` if it is on another machine.

        Raises:
            StartupError: no engine answers there, or the engine has another version of the protocol.
            EngineDeadError: the core exited before it answered.
        """
        link = cls(context, address, keys)
        try:
            link.facts = await asyncio.wait_for(asyncio.shield(link._welcome), timeout_s)
        except TimeoutError:
            fault = link._wire.fault
            await link.close()
            raise StartupError(
                f"the engine on {address} is not ready: it still loads its model"
                if link._wire.has_met
                else f"no engine answers on {address}" + (f": {fault}" if fault else ""),
                hint="octavo serve prints the address of its engine once it is ready",
            ) from None
        except BaseException:  # a cancelled `connect` must not leave an open socket behind either
            await link.close()
            raise
        return link

    @property
    def is_up(self) -> bool:
        """Whether a core is up."""
        return not self.failure and not self.downtime

    def lose(self, cause: str, kind: RestartCause = "core_died") -> None:
        """Handle the loss of the core: wait for the next one, or fail if the reconnect policy says so."""
        if self.failure:
            return
        if self.reconnect_policy.limit_s == 0 or not self._welcome.done():
            self.fail(cause)
            return
        if self.downtime is None:
            self._begin_downtime(cause, kind)
        elif self.downtime.cause == _GONE:  # the process watcher knows the real cause
            self.downtime = Downtime(cause, self.downtime.since_s, kind)
        self._wire.close(linger_ms=0)
        self._wire = self._open_wire()

    def move_to(self, address: str) -> None:
        """Connect to the core at another address: the engine was restarted elsewhere."""
        self.address = address
        self.lose(f"the engine is at {address} now")

    def fail(self, cause: str) -> None:
        """Mark the engine as gone for good: every live request and call fails with the first cause given."""
        if self.failure:
            return
        self.failure = EngineDeadError(cause)
        self.downtime = None
        if self._giving_up:
            self._giving_up.cancel()
        self._on_failed(self.failure)
        if not self._welcome.done():
            self._welcome.set_exception(self.failure)
            self._welcome.exception()  # maybe nobody waits for it, which is not an error

    def _reopen_wire(self, wire: Wire) -> None:
        """Connect again, possibly to another address, unless the connection was replaced meanwhile."""
        if wire is self._wire and self.downtime:
            wire.close(linger_ms=0)
            self._wire = self._open_wire()

    def _open_wire(self) -> Wire:
        """Open a connection and introduce this frontend."""
        wire = Wire(self._context, self.address, self._receive, self._on_lost, self._fail_broken, self._keys)
        program = os.path.basename(sys.argv[0]).encode(errors="replace").decode() or "python"
        wire.send(self._requests.encode(Connect(client=f"{program} pid={os.getpid()}", frontend_id=self._frontend_id)))
        return wire

    def _on_lost(self, wire: Wire) -> None:
        if wire is not self._wire:
            return
        if wire.fault and not self._welcome.done():
            self._welcome.set_exception(StartupError(f"no engine answers on {self.address}: {wire.fault}"))
        else:
            self.lose(_GONE)

    def _begin_downtime(self, cause: str, kind: RestartCause) -> None:
        self.downtime = Downtime(cause, time.monotonic(), kind)
        self._wrong_engine_delay_s = WRONG_ENGINE_DELAY_S
        level = logging.INFO if kind == "planned" else logging.ERROR
        logger.log(level, "the core is gone: %s; %d requests wait for the next one", cause, self.num_unfinished)
        self._suspend(cause)
        if (limit_s := self.reconnect_policy.limit_s) is not None:
            message = f"{cause}; none came back within {limit_s:g} s"
            self._giving_up = asyncio.get_running_loop().call_later(limit_s, self.fail, message)
        self.on_down()
        if kind != "planned":
            self.on_lost()

    def _end_downtime(self, facts: EngineFacts) -> Slices:
        """Handle the first message of a core after a downtime; return the remaining work, as `_receive` does."""
        assert self.downtime is not None
        downtime, self.downtime = self.downtime, None
        if self._giving_up:
            self._giving_up.cancel()
        # The same core may be back: it was only unreachable.
        is_another = (facts.epoch, facts.pulse_path) != (self.facts.epoch, self.facts.pulse_path)
        kind = "planned" if facts.replaced_epoch == self.facts.epoch else downtime.kind
        self.facts = facts
        self.last_words = ""
        rest = self._continue(is_another=is_another)
        pause_s, num_requests = time.monotonic() - downtime.since_s, self.num_unfinished
        logger.info("the engine is back after %.2f s: %d requests continue (%s)", pause_s, num_requests, downtime.cause)
        if is_another:
            self.on_resumed(Resumption(downtime.cause, kind, pause_s, num_requests))
        self.on_up()
        return rest

    def _fail_broken(self, error: Exception) -> None:
        """Fail every request: a message could not be handled, and the request it belonged to would wait forever."""
        self.fail(f"the link to the engine broke: {type(error).__name__}: {error}")

    def _frames(self, request: FrontendMessage) -> list[Frame]:
        """Encode a message whose values were checked when it was created.

        Raises:
            InvalidRequestError: a value cannot be encoded, or is too large for a message.
        """
        try:
            frames = self._requests.encode(request)
        except (ProtocolError, TypeError, OverflowError, UnicodeEncodeError) as error:
            raise InvalidRequestError(f"a value of the request cannot be encoded: {error}") from error
        if (size := max(map(len, frames))) > MAX_FRAME_BYTES:
            raise InvalidRequestError(
                f"the request takes {size} bytes as a message; at most {MAX_FRAME_BYTES} are allowed"
            )
        return frames

    def _receive(self, event: Event) -> Slices | None:
        """Handle a message; return the remaining work, which is done before the next message is handled."""
        self.num_heard += 1
        match event:
            case Welcome():
                return self._on_welcome(event.facts)
            case Refused():
                self._on_rejected(event.message)
            case EngineDying():
                self.last_words = event.message
                if event.message:
                    self.lose(event.message)
                else:
                    self.fail("the engine was shut down")
            case _:
                return self._handle(event)
        return None

    def _on_welcome(self, facts: EngineFacts) -> Slices | None:
        if not self._welcome.done():
            self._welcome.set_result(facts)
        elif self.downtime and self.accepts(facts):
            return self._end_downtime(facts)
        elif self.downtime:
            delay_s = self._wrong_engine_delay_s
            if delay_s == WRONG_ENGINE_DELAY_S:
                logger.warning(
                    "another engine answers on %s: waiting there for engine %d until it is back or removed",
                    *(self.address, self.index),
                )
            self._wrong_engine_delay_s = min(2 * delay_s, MAX_WRONG_ENGINE_DELAY_S)
            asyncio.get_running_loop().call_later(delay_s, self._reopen_wire, self._wire)
        return None

    def _on_rejected(self, message: str) -> None:
        if not self._welcome.done():
            self._welcome.set_exception(StartupError(message))
        elif self.downtime:  # the new core is of another release
            self.fail(message)
        else:  # the core has dropped this frontend, which did not read its events
            self.lose(f"the engine has ended the connection: {message}")
