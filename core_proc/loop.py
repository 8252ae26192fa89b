"""The hot loop of the core: plan, execute, commit. It names no feature and catches no error."""

from typing import Protocol

from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.service import FrontendService
from octavo.core_proc.waiting import Waiter
from octavo.core_proc.workers.group import StepExecutor
from octavo.protocol.pulse import PulseWriter


class Companion(Protocol):
    """What has a say in steps beside the scheduler: it is heard after each change of what is in flight."""

    @property
    def wake_fd(self) -> int:
        """A file descriptor; readable when the service should be given a turn."""

    def settle(self) -> list[ClientEvent]:
        """Do what has become possible, and return what the frontends must hear of it. Never blocks."""


class TendedExecutor(StepExecutor, Protocol):
    """Workers that may be away for a while, and come back."""

    @property
    def is_ready(self) -> bool:
        """True while steps may be executed."""

    @property
    def timeout_s(self) -> float | None:
        """How long `tend` need not be called when nothing happens; None: for ever."""

    def tend(self) -> list[ClientEvent]:
        """Do what is due by now, and return what the frontends must hear of it. Never blocks."""


class StepLoop:
    """Drives one scheduler and its workers."""

    def __init__(
        self,
        service: FrontendService,
        scheduler: Scheduler,
        companion: Companion,
        workers: TendedExecutor,
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

        The pulse stands still while a step is in flight, and while there are no workers: only a step that ends proves
        that they live.
        """
        while self._service.is_open:
            if self._workers.is_ready and not self._scheduler.num_in_flight:
                self._pulse.beat(has_work=False)
            has_mail, has_news = waiter.wait(self._timeout_s)
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
        self._service.deliver(self._workers.tend())
        if self._workers.is_ready:
            self._fill()

    def _fill(self) -> None:
        """Plan until as many steps are in flight as may be, or nothing is left to compute."""
        while self._scheduler.may_plan(self._depth) and (plan := self._scheduler.plan()) is not None:
            self._workers.execute(plan)
            self._service.deliver(self._companion.settle())
            self._pulse.beat(has_work=True)

    @property
    def _timeout_s(self) -> float | None:
        timeouts_s = (self._service.timeout_s, self._workers.timeout_s)
        return min((timeout_s for timeout_s in timeouts_s if timeout_s is not None), default=None)
