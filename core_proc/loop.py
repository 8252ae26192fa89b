"""The hot loop of the core: plan, execute, commit. It names no feature and catches no error."""

from typing import Protocol

from octavo.core_proc.scheduler.scheduler import ClientEvent, Scheduler
from octavo.core_proc.service import FrontendService
from octavo.core_proc.waiting import Waiter
from octavo.core_proc.workers.group import WorkerGroup
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
        depth: int,
    ) -> None:
        self._service = service
        self._scheduler = scheduler
        self._companion = companion
        self._workers = workers
        self._pulse = pulse
        self._depth = depth

    def run(self, waiter: Waiter) -> None:
        """Take one turn after another until the service is closed.

        The pulse stands still while a step is in flight: only a step that ends proves that the workers live.
        """
        while self._service.is_open:
            if not self._scheduler.num_in_flight:
                self._pulse.beat(has_work=False)
            has_mail, has_news = waiter.wait(self._service.timeout_s)
            self.turn(has_mail=has_mail, has_news=has_news)

    def turn(self, *, has_mail: bool, has_news: bool) -> None:
        """Handle what has come, and keep up to `depth` steps in flight. Never blocks.

        Args:
            has_mail: whether a frontend has written.
            has_news: whether anything else has happened.
        """
        self._service.serve(has_mail=has_mail)
        if has_news and (result := self._workers.take_result()) is not None:
            self._service.deliver(self._scheduler.commit(result))
            self._service.deliver(self._companion.settle())
            self._pulse.beat(has_work=True)
        while self._scheduler.may_plan(self._depth) and (plan := self._scheduler.plan()) is not None:
            self._workers.execute(plan)
            self._service.deliver(self._companion.settle())
            self._pulse.beat(has_work=True)
