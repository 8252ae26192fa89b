"""`Waiter`: where the core sleeps, in one `poll` over everything that can happen to it. Knows nothing of steps."""

from collections.abc import Iterable
from typing import Any

import zmq

from octavo.protocol.lifecycle import StopSignal


class Waiter:
    """Waits for frontends, signals and news of any other kind.

    Args:
        inbox: the socket of the frontends.
        stop: the signals of this process.
        news: sockets and file descriptors of all else.
    """

    def __init__(self, inbox: "zmq.Socket[bytes]", stop: StopSignal, news: Iterable[Any]) -> None:
        self._inbox = inbox
        self._stop = stop
        self._poller = zmq.Poller()
        for waitable in (inbox, stop.fileno(), *news):
            self._poller.register(waitable, zmq.POLLIN)

    def wait(self, timeout_s: float | None) -> tuple[bool, bool]:
        """Sleep until anything at all happens; tell whether a frontend has written, and whether anything else has come.

        Blocks until: that, or `timeout_s` is over (None: for ever).
        """
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
