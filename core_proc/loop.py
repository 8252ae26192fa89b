"""The hot loop of the core: plan, execute, commit. It names no feature and catches no error."""

from collections.abc import Iterable
from typing import Any

import zmq

from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.service import FrontendService
from octavo.core_proc.workers.group import WorkerGroup
from octavo.protocol.lifecycle import StopSignal
from octavo.protocol.pulse import PulseWriter


class StepLoop:
    """Drives one scheduler and one group of workers."""

    def __init__(
        self,
        service: FrontendService,
        scheduler: Scheduler,
        workers: WorkerGroup,
        pulse: PulseWriter,
        stop: StopSignal,
        inbox: "zmq.Socket[bytes]",
        depth: int,
    ) -> None:
        self._service = service
        self._scheduler = scheduler
        self._workers = workers
        self._pulse = pulse
        self._stop = stop
        self._depth = depth
        self._inbox = inbox
        self._poller = zmq.Poller()
        waitables: Iterable[Any] = [inbox, stop.fileno(), *workers.waitables]
        for waitable in waitables:
            self._poller.register(waitable, zmq.POLLIN)

    def run(self) -> None:
        """Keep up to `depth` steps in flight until the service is closed."""
        while self._service.is_open:
            has_mail, has_news = self._wait()
            self._service.serve(has_mail=has_mail)
            if has_news and (result := self._workers.take_result()) is not None:
                self._service.deliver(self._scheduler.commit(result))
                self._pulse.beat(has_work=True)
            while self._scheduler.num_in_flight < self._depth and (plan := self._scheduler.plan()) is not None:
                self._workers.execute(plan)
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
