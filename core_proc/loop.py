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
        self._poller = zmq.Poller()
        waitables: Iterable[Any] = [inbox, stop.fileno(), *workers.waitables]
        for waitable in waitables:
            self._poller.register(waitable, zmq.POLLIN)

    def run(self) -> None:
        """Keep up to `depth` steps in flight until the service is closed."""
        while self._service.is_open:
            self._service.serve()
            is_full = self._scheduler.num_in_flight == self._depth
            plan = None if is_full else self._scheduler.plan()
            if plan is not None:
                self._workers.execute(plan)
            elif (result := self._workers.take_result()) is not None:
                self._service.deliver(self._scheduler.commit(result))
            else:
                self._wait()
                continue
            self._pulse.beat(has_work=True)

    def _wait(self) -> None:
        """Sleep until anything at all happens.

        The pulse stands still while a step is in flight: only a step that ends proves that the workers live.
        """
        if not self._scheduler.num_in_flight:
            self._pulse.beat(has_work=False)
        timeout_s = self._service.timeout_s
        self._poller.poll(None if timeout_s is None else int(1000 * timeout_s) + 1)
        self._stop.acknowledge()
