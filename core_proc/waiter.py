"""`Waiter`: the core's one `poll` over sockets, signals and file descriptors. Knows nothing of steps."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import zmq

from octavo.protocol.lifecycle import StopSignal


class ChangingNews(Protocol):
    """A source of events whose sockets and file descriptors change from time to time."""

    @property
    def waitables(self) -> Sequence[Any]:
        """Its sockets and file descriptors now."""

    @property
    def version(self) -> int:
        """Changes whenever `waitables` changes."""


class Waiter:
    """Waits for frontends, signals and other events.

    Args:
        inbox: the socket of the frontends.
        stop: the signals of this process.
        news: sockets and file descriptors that stay the same.
        changing: a source whose sockets change.
    """

    def __init__(
        self, inbox: "zmq.Socket[bytes]", stop: StopSignal, news: Iterable[Any], changing: ChangingNews
    ) -> None:
        self._inbox = inbox
        self._stop = stop
        self._fixed = [inbox, stop.fileno(), *news]
        self._changing = changing
        self._version = changing.version
        self._poller = self._make_poller()

    def wait(self, timeout_s: float | None) -> tuple[bool, bool]:
        """Wait for an event. Return whether a frontend has sent a message, and whether anything else has happened.

        Blocks until: that, or `timeout_s` is over (None: for ever).
        """
        if self._version != self._changing.version:
            self._version = self._changing.version
            self._poller = self._make_poller()
        ready = self._poller.poll(None if timeout_s is None else int(1000 * timeout_s) + 1)
        if self._stop.count:
            self._stop.acknowledge()
        has_mail = has_news = False
        for waitable, _ in ready:
            if waitable is self._inbox:
                has_mail = True
            else:
                has_news = True
        return has_mail, has_news

    def _make_poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        for waitable in (*self._fixed, *self._changing.waitables):
            poller.register(waitable, zmq.POLLIN)
        return poller
