"""The hot loop of the core: plan, execute, commit. It names no feature and catches no error."""

from collections.abc import Iterable
from typing import Any, Protocol

import zmq

from octavo.core_proc.scheduler.scheduler import ClientEvent, Scheduler
from octavo.core_proc.service import FrontendService
from octavo.core_proc.workers.group import WorkerGroup
from octavo.protocol.lifecycle import StopSignal
from octavo.protocol.pulse import PulseWriter


class Companion(Protocol):
    """What has a say in steps beside the scheduler: it is heard after each change of what is in flight."""

    @property
    def wake_fd(self) -> int:
        """A file descriptor; readable when the service should be given a turn."""

    def settle(self) -> list[ClientEvent]:
        """Do what has become possible, and return what the frontends must hear of it. Never blocks."""


class StepLoop:
    """Drives one scheduler and one group of workers."""

    def __init__(
        self,
        service: FrontendService,
        scheduler: Scheduler,
        companion: Companion,
        workers: WorkerGroup,
        pulse: PulseWriter,
        stop: StopSignal,
        inbox: "zmq.Socket[bytes]",
        depth: int,
    ) -> None:
        self._service = service
        self._scheduler = scheduler
        self._companion = companion
        self._workers = workers
        self._pulse = pulse
        self._stop = stop
        self._depth = depth
        self._inbox = inbox
        self._poller = zmq.Poller()
        waitables: Iterable[Any] = [inbox, stop.fileno(), companion.wake_fd, *workers.waitables]
        for waitable in waitables:
            self._poller.register(waitable, zmq.POLLIN)

    def run(self) -> None:
        """Keep up to `depth` steps in flight until the service is closed."""
        while self._service.is_open:
            has_mail, has_news = self._wait()
            self._service.serve(has_mail=has_mail)
            if has_news and (result := self._workers.take_result()) is not None:
                self._service.deliver(self._scheduler.commit(result))
                self._service.deliver(self._companion.settle())
                self._pulse.beat(has_work=True)
            while self._scheduler.num_in_flight < self._depth and (plan := self._scheduler.plan()) is not None:
                self._workers.execute(plan)
                self._service.deliver(self._companion.settle())
                self._pulse.beat(has_work=True)

    def _wait(self) -> tuple[bool, bool]:
        """Sleep until anything at all happens; tell whether a frontend has written, and whether anything else has come.

        The pulse stands still while a step is in flight: only a step that ends proves that the workers live.
        """
        if not self._scheduler.num_in_flight:
            self._pulse.beat(has_work=False)
        timeout_s = self._service.timeout_s
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
