"""`Waiter`: the core's only `poll` over sockets, signals and file descriptors. Independent of steps."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import zmq

from octavo.protocol.lifecycle import StopSignal


class ChangingWaitables(Protocol):
    """A set of sockets and file descriptors that changes over time."""

    @property
    def waitables(self) -> Sequence[Any]:
        """The current sockets and file descriptors."""

    @property
    def version(self) -> int:
        """A number that changes whenever `waitables` changes."""


class Waiter:
    """Waits for frontends, signals and other events.

    Args:
        frontends: the socket of the frontends.
        stop: the signals of this process.
        fixed: sockets and file descriptors that never change.
        changing: sockets and file descriptors that change.
    """

    def __init__(
        self, frontends: "zmq.Socket[bytes]", stop: StopSignal, fixed: Iterable[Any], changing: ChangingWaitables
    ) -> None:
        self._frontends = frontends
        self._stop = stop
        self._fixed = [frontends, stop.fileno(), *fixed]
        self._changing = changing
        self._version = changing.version
        self._poller = self._make_poller()

    def wait(self, timeout_s: float | None) -> tuple[bool, bool]:
        """Wait for an event. Return whether a frontend has sent a message, and whether anything else has happened.

        Blocks until: an event, or `timeout_s` seconds have passed (None: no limit).
        """
        if self._version != self._changing.version:
            self._version = self._changing.version
            self._poller = self._make_poller()
        ready = self._poller.poll(None if timeout_s is None else int(1000 * timeout_s) + 1)
        if self._stop.count:
            self._stop.acknowledge()
        has_messages = has_events = False
        for waitable, _ in ready:
            if waitable is self._frontends:
                has_messages = True
            else:
                has_events = True
        return has_messages, has_events

    def _make_poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        for waitable in (*self._fixed, *self._changing.waitables):
            poller.register(waitable, zmq.POLLIN)
        return poller
