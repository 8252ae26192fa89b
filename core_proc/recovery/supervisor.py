"""`WorkerSupervisor`: the workers as the step loop sees them, whichever processes they are at the moment.

When a group of workers fails, the scheduler forgets what was in their memory and the next group is started; the loop
turns all the while, and calls `tend` each time. Talks to no socket and waits for nothing: that is what groups do.
"""

import logging
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from octavo.core_proc.recovery.blame import Blame
from octavo.core_proc.request import RequestKey
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.workers.group import WorkerFailed, WorkerGroup
from octavo.protocol.config import CachePlan
from octavo.protocol.errors import StartupError
from octavo.protocol.restarts import LONG_LIFE_S, RestartPolicy
from octavo.protocol.steps import SlotMask, StepPlan, StepResult

logger = logging.getLogger(__name__)

OVERSLEPT_S = 1.0
"""Who notices a missed deadline this much too late was itself stopped, and the workers perhaps with it."""


class SupervisionState(Enum):
    """Where the present group of workers is in its life."""

    READY = "ready"
    BACKING_OFF = "backing_off"
    """There is none; the next is started when the delay is over."""
    STARTING = "starting"


class WorkerSupervisor:
    """Executes steps on one group of workers after another.

    Args:
        group: the first one, ready.
        make_group: starts another of the given number, without waiting; raises `StartupError` or `OSError`.
        plan: the cache that each group has.
        scheduler: what it runs, and what it counts.
        blame: finds requests that kill workers.
        clock: in seconds.
        step_timeout_s: a step that takes longer has hung.
        start_timeout_s: the same of the start of a group.
        max_restarts: in a row without a step in between, before there is no hope.
        on_loss: called when a group has failed.
    """

    def __init__(
        self,
        group: WorkerGroup,
        make_group: Callable[[int], WorkerGroup],
        plan: CachePlan,
        scheduler: Scheduler,
        blame: Blame,
        clock: Callable[[], float],
        *,
        step_timeout_s: float,
        start_timeout_s: float,
        max_restarts: int,
        on_loss: Callable[[], None],
    ) -> None:
        self._group: WorkerGroup | None = group
        self._make_group = make_group
        self._plan = plan
        self._scheduler = scheduler
        self._clock = clock
        self._step_timeout_s = step_timeout_s
        self._start_timeout_s = start_timeout_s
        self._on_loss = on_loss
        self._blame = blame
        self._policy = RestartPolicy(max_restarts)
        self._state = SupervisionState.READY
        self._entered_s = clock()
        """Since when that is so."""
        self._due_s: float | None = None
        """When the present state must have changed: the step's result come, the delay passed, the group started."""
        self._ending: list[WorkerGroup] = []
        """Groups that were killed and have not ended yet."""
        self._num_groups = 1
        self._lost_s: float | None = None
        """When the workers were lost, until they compute again."""
        self._interrupted: set[RequestKey] = set()
        """The requests that ran on workers which were lost, until others compute again."""
        self._events: list[ClientEvent] = []
        self.version = 0
        """Grows whenever `waitables` have changed."""

    @property
    def is_ready(self) -> bool:
        """True while steps may be executed."""
        return self._state is SupervisionState.READY

    @property
    def waitables(self) -> list[Any]:
        """Sockets and file descriptors: one becomes readable when `take_result` or `tend` has something to do."""
        # A group that starts is not looked after while an earlier one still ends, and must not keep the core awake.
        groups = self._ending or ([self._group] if self._group else [])
        return [waitable for group in groups for waitable in group.waitables]

    @property
    def timeout_s(self) -> float | None:
        """How long `tend` need not be called when nothing happens; None: for ever."""
        return None if self._due_s is None else max(0.0, self._due_s - self._clock())

    def execute(self, plan: StepPlan) -> None:
        """Send a step to every rank. Never blocks."""
        assert self._group is not None
        self._expect_answer()
        self._group.execute(plan)

    def supply(self, masks: Sequence[SlotMask]) -> None:
        """Send every rank the masks of the oldest step that awaits them and has none. Never blocks."""
        assert self._group is not None
        self._group.supply(masks)

    def take_result(self) -> StepResult | None:
        """Return the result of the oldest step that has one, None when none is there. Never blocks.

        Raises:
            WorkerFailed: the workers have failed so often that there is no hope; the root cause.
        """
        if self._group is None or not self.is_ready:
            return None
        try:
            result = self._group.take_result()
        except WorkerFailed as failure:
            self._lose(failure)
            return None
        if result is not None:
            # The step of this result is still counted as in flight.
            self._due_s = self._clock() + self._step_timeout_s if self._scheduler.num_in_flight > 1 else None
            self._policy.progress()
            if self._lost_s is not None:
                self._note_recovery(self._lost_s)
        return result

    def profile(self, directory: str | None, on_done: Callable[[str], None]) -> None:
        """Start (None: stop) the profiler on every rank.

        Args:
            directory: for the profile.
            on_done: called now or later, with what went wrong, "" when nothing did.
        """
        if self._group is None or not self.is_ready:
            on_done("the workers are being started again")
            return

        def done(fault: str) -> None:
            if not self._scheduler.num_in_flight:
                self._due_s = None
            on_done(fault)

        self._expect_answer()
        self._group.profile(directory, done)

    def tend(self) -> list[ClientEvent]:
        """Do what is due by now, and return what the frontends must hear of it. Never blocks.

        Called before plans are made: afterwards none includes a request that may not run.

        Raises:
            WorkerFailed: the workers have failed so often that there is no hope; the root cause.
        """
        is_due = self._due_s is not None and self._clock() >= self._due_s
        if self._ending:
            self._reap()
        if self._state is SupervisionState.STARTING and self._group is not None:
            self._advance(self._group, is_overdue=is_due)
        elif is_due and self._state is SupervisionState.BACKING_OFF:
            self._start()
        elif is_due:
            self._judge_silence()
        # With nothing left to compute there will be no step to end the pause.
        if self._lost_s is not None and self.is_ready and not self._scheduler.requests:
            self._note_recovery(self._lost_s)
        self._blame.review()
        events, self._events = self._events, []
        return events

    def stop(self) -> None:
        """Ask all workers to end when they have done what they were told before.

        Blocks until: they have ended, for a bounded time.
        """
        if self._group is not None and self.is_ready:
            self._group.stop()

    def kill(self) -> None:
        """End all workers at once, those that have ended already included.

        Blocks until: they have ended.
        """
        for group in self._ending if self._group is None else [self._group, *self._ending]:
            group.kill()

    def _lose(self, failure: WorkerFailed) -> None:
        """Let the requests wait, and prepare the start of another group.

        Raises:
            WorkerFailed: there is no hope; the first cause of those failures that nothing came between.
        """
        if self.is_ready and failure.cause != "hung" and self._clock() - self._entered_s >= LONG_LIFE_S:
            self._policy.progress()
        verdict = self._policy.fail(str(failure))
        if verdict.is_hopeless:
            raise WorkerFailed(self._policy.root_cause, failure.cause) from failure
        scheduler = self._scheduler
        if self._lost_s is None:
            self._lost_s = self._clock()
        self._interrupted.update(request.key for request in scheduler.running)
        counters = scheduler.counters
        counters.worker_failures[failure.cause] = counters.worker_failures.get(failure.cause, 0) + 1
        if self._group is not None:
            self._group.abandon(str(failure))
            self._ending.append(self._group)
            self._group = None
        self._events += self._blame.take_loss(str(failure))
        delay = f" in {verdict.delay_s:.1f} s" if verdict.delay_s else ""
        num_requests = len(scheduler.requests)
        logger.error("lost the workers: %s. They start again%s, and %d requests wait", failure, delay, num_requests)
        self._enter(SupervisionState.BACKING_OFF, verdict.delay_s)
        self._on_loss()

    def _start(self) -> None:
        try:
            self._group = self._make_group(self._num_groups)
        except (OSError, StartupError) as error:
            self._lose(WorkerFailed(str(error), "not_started"))
            return
        self._num_groups += 1
        self._enter(SupervisionState.STARTING, self._start_timeout_s)

    def _advance(self, group: WorkerGroup, *, is_overdue: bool) -> None:
        """Look after a group that starts; what an earlier one still holds may be what it needs."""
        try:
            is_ready = not self._ending and group.advance(self._plan)
        except WorkerFailed as failure:
            self._lose(WorkerFailed(str(failure), "not_started"))
            return
        self.version += 1
        if is_ready:
            self._enter(SupervisionState.READY, None)
        elif is_overdue:
            self._lose(WorkerFailed(f"the workers were not ready after {self._start_timeout_s:.0f} s", "not_started"))

    def _expect_answer(self) -> None:
        """Give the workers their time, unless it is running already."""
        if self._due_s is None:
            self._due_s = self._clock() + self._step_timeout_s

    def _judge_silence(self) -> None:
        """An answer is overdue: either the workers hang, or this process was stopped, too."""
        assert self._due_s is not None
        if self._clock() - self._due_s > OVERSLEPT_S:
            self._due_s = self._clock() + self._step_timeout_s
            return
        message = (
            f"the workers have not answered for {self._step_timeout_s:g} s (--execute-model-timeout): they hang, or "
            "are too slow for --max-num-batched-tokens"
        )
        self._lose(WorkerFailed(message, "hung"))

    def _reap(self) -> None:
        left = [group for group in self._ending if not group.is_gone]
        if len(left) < len(self._ending):
            self._ending = left
        self.version += 1

    def _note_recovery(self, lost_s: float) -> None:
        """The workers compute again, or could."""
        pause_s = self._clock() - lost_s
        self._lost_s = None
        num_resumed = sum(key in self._scheduler.requests for key in self._interrupted)
        self._interrupted.clear()
        counters = self._scheduler.counters
        counters.last_worker_pause_s = pause_s
        counters.requests_resumed += num_resumed
        logger.info("the workers are back: the pause was %.2f s, %d requests go on", pause_s, num_resumed)

    def _enter(self, state: SupervisionState, timeout_s: float | None) -> None:
        self._state = state
        self._entered_s = self._clock()
        self._due_s = None if timeout_s is None else self._clock() + timeout_s
        self.version += 1
