"""The hot loop of the core: plan, execute, commit. It names no feature and catches no error."""

from typing import Protocol

from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.service import FrontendService
from octavo.core_proc.waiter import Waiter
from octavo.core_proc.workers.commands import StepExecutor
from octavo.protocol.pulse import PulseWriter


class SupervisedWorkers(StepExecutor, Protocol):
    """Workers that can be lost and restarted."""

    @property
    def is_ready(self) -> bool:
        """True while steps may be executed."""

    @property
    def timeout_s(self) -> float | None:
        """Seconds until `poll` must be called even if nothing happens. None if there is no limit."""

    def join_steps(self) -> None:
        """Join steps that other engines have begun, because there is nothing to plan here. Never blocks."""

    def poll(self) -> list[ClientEvent]:
        """Do what is due and return events for the frontends. Never blocks."""


class StepLoop:
    """Runs one scheduler and its workers."""

    def __init__(
        self,
        service: FrontendService,
        scheduler: Scheduler,
        workers: SupervisedWorkers,
        pulse: PulseWriter,
        depth: int,
    ) -> None:
        self._service = service
        self._scheduler = scheduler
        self._workers = workers
        self._pulse = pulse
        self._depth = depth

    def run(self, waiter: Waiter) -> None:
        """Run iterations until the service is closed.

        The pulse does not beat while a step is in flight or while there are no workers: only a completed step proves
        that the workers are alive.
        """
        self.run_iteration(has_messages=False, has_events=False)  # handle what has arrived during the start
        while self._service.is_open:
            if self._workers.is_ready and not self._scheduler.num_in_flight:
                self._pulse.beat(has_work=False)
            has_messages, has_events = waiter.wait(self._timeout_s)
            self.run_iteration(has_messages=has_messages, has_events=has_events)

    def run_iteration(self, *, has_messages: bool, has_events: bool) -> None:
        """Handle incoming messages and events, and keep up to `depth` steps in flight. Never blocks.

        Args:
            has_messages: whether a frontend has sent a message.
            has_events: whether anything else has happened.
        """
        self._service.serve(has_messages=has_messages)
        if has_events and (result := self._workers.take_result()) is not None:
            self._service.deliver(self._scheduler.commit(result))
            self._service.deliver(self._scheduler.hooks.on_step())
            self._pulse.beat(has_work=True)
        self._service.deliver(self._workers.poll())
        may_plan = self._service.advance()
        if self._workers.is_ready and may_plan:
            self._fill()
        elif self._workers.is_ready:
            self._workers.join_steps()

    def _fill(self) -> None:
        """Plan until `depth` steps are in flight or nothing is left to compute."""
        while self._scheduler.may_plan(self._depth):
            if (plan := self._scheduler.plan()) is None:
                self._service.deliver(self._scheduler.hooks.on_step())
                self._workers.join_steps()
                return
            self._workers.execute(plan)
            self._service.deliver(self._scheduler.hooks.on_step())
            self._pulse.beat(has_work=True)

    @property
    def _timeout_s(self) -> float | None:
        timeouts_s = (self._service.timeout_s, self._workers.timeout_s)
        return min((timeout_s for timeout_s in timeouts_s if timeout_s is not None), default=None)
