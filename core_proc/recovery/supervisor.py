"""`WorkerSupervisor`: the workers as seen by the step loop, whichever group of processes currently runs.

When a group fails, the scheduler drops the state in its memory, and the next group is started while the loop continues.
The loop calls `poll` in each iteration. The supervisor itself never blocks and uses no socket.
"""

import logging
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import islice
from typing import Any

from octavo.core_proc.recovery.crash_attribution import CrashAttribution
from octavo.core_proc.request_map import RequestKey
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.workers.commands import CombinedReply, MakeCommand, OnDone, WorkerCommands
from octavo.core_proc.workers.group import WorkerFailed, WorkerGroup
from octavo.protocol.config import CachePlan
from octavo.protocol.errors import StartupError
from octavo.protocol.restarts import LONG_LIFE_S, RestartDecision, RestartPolicy
from octavo.protocol.steps import StepPlan, StepResult, TokenMask
from octavo.protocol.worker_commands import Profile

logger = logging.getLogger(__name__)

SUSPENDED_S = 1.0
"""If we notice a missed deadline this many seconds late, our own process was suspended: don't blame the workers."""


class SupervisionState(Enum):
    """State of the current group."""

    READY = "ready"
    BACKING_OFF = "backing_off"
    """There is no group; the next one starts after a delay."""
    STARTING = "starting"


class WorkerSupervisor:
    """Executes steps on one group of workers after another.

    Args:
        group: the first group, which is ready.
        plan: the cache plan that every group allocates.
        scheduler: owns the requests and the counters.
        attribution: finds requests that crash workers.
        clock: returns the time in seconds.
        step_timeout_s: seconds after which a step counts as hung.
        start_timeout_s: seconds after which a start counts as failed.
        max_restarts: give up after this many restarts without a step in between.
        on_loss: called when a group has failed.
    """

    def __init__(
        self,
        group: WorkerGroup,
        plan: CachePlan,
        scheduler: Scheduler,
        attribution: CrashAttribution,
        clock: Callable[[], float],
        *,
        step_timeout_s: float,
        start_timeout_s: float,
        max_restarts: int,
        on_loss: Callable[[], None],
    ) -> None:
        self._group: WorkerGroup | None = group
        """The current group. None between a failure and the next start."""
        self._latest = group
        """The group whose `restart` creates the next one."""
        self._commands = WorkerCommands(group)
        self._plan = plan
        self._scheduler = scheduler
        self._clock = clock
        self._step_timeout_s = step_timeout_s
        self._start_timeout_s = start_timeout_s
        self._on_loss = on_loss
        self._attribution = attribution
        self._policy = RestartPolicy(max_restarts)
        self._state = SupervisionState.READY
        self._entered_s = clock()
        """When the current state was entered."""
        self._due_s: float | None = None
        """Deadline of the current state: of a reply, of the delay, or of the group's start. None if there is none."""
        self._ending: list[WorkerGroup] = []
        """Groups that were killed but have not exited yet."""
        self._loads_due_s: dict[int, float] = {}
        """Deadlines of the replies to `load_blocks`, the earliest first."""
        self._num_loads = 0
        self._lost_s: float | None = None
        """When the workers were lost. None while they compute."""
        self._interrupted: set[RequestKey] = set()
        """Requests that were running when the workers were lost."""
        self._num_joined = 0
        """The current group's `num_joined` when it last made progress."""
        self._events: list[ClientEvent] = []
        self.on_replaced: Callable[[], None] = lambda: None
        """Called when a new group is ready. It has the weights with which the engine was started."""
        self.version = 0
        """Changes whenever `waitables` changes."""

    @property
    def is_ready(self) -> bool:
        """True while steps may be executed."""
        return self._state is SupervisionState.READY

    @property
    def cache_plan(self) -> CachePlan:
        """The cache plan according to which the workers allocate."""
        return self._plan

    @property
    def waitables(self) -> list[Any]:
        """Sockets and file descriptors that become readable when `take_result` or `poll` has work to do."""
        # A starting group is not advanced before earlier groups have exited, so it must not wake the core.
        groups = self._ending or ([self._group] if self._group else [])
        return [waitable for group in groups for waitable in group.waitables]

    @property
    def timeout_s(self) -> float | None:
        """Seconds that the core may sleep before the next `poll`. None if it may sleep until something happens."""
        due_s = min(filter(None, (self._due_s, *islice(self._loads_due_s.values(), 1))), default=None)
        return None if due_s is None else max(0.0, due_s - self._clock())

    def execute(self, plan: StepPlan) -> None:
        """Send a step to every rank. Never blocks."""
        assert self._group is not None
        self._expect_reply()
        self._commands.execute(plan)

    def join_steps(self) -> None:
        """Join steps that other engines have begun, because there is nothing to plan here. Never blocks."""
        assert self._group is not None
        self._group.join_steps()

    def send_masks(self, masks: Sequence[TokenMask]) -> None:
        """Send every rank the masks of the oldest step that still awaits them. Never blocks."""
        assert self._group is not None
        self._commands.send_masks(masks)

    def take_result(self) -> StepResult | None:
        """Return the result of the oldest step that has one. Return None if there is none. Never blocks.

        Raises:
            WorkerFailed: the workers keep failing and are given up; the root cause.
        """
        if self._group is None or not self.is_ready:
            return None
        try:
            result = self._commands.take_result()
        except WorkerFailed as failure:
            self._lose(failure)
            return None
        if result is not None:
            # The scheduler still counts the step of this result as in flight.
            self._due_s = self._clock() + self._step_timeout_s if self._scheduler.num_in_flight > 1 else None
            self._policy.progress()
            if self._lost_s is not None:
                self._note_recovery(self._lost_s)
        elif self._group is not None and self._group.num_joined > self._num_joined:
            self._policy.progress()
            self._num_joined = self._group.num_joined
        return result

    def profile(self, directory: str | None, on_done: Callable[[str], None]) -> None:
        """Start the profiler on every rank, or stop it if `directory` is None.

        Args:
            directory: directory of the profile.
            on_done: called now or later with an error message, "" for success.
        """
        self._command(
            lambda sequence: Profile(sequence, directory), lambda reply: on_done(reply.fault), self._step_timeout_s
        )

    def command(self, make: MakeCommand, on_done: OnDone) -> None:
        """Send every rank a command about weights, which may take as long as a start.

        Args:
            make: returns the command.
            on_done: called now or later with the ranks' replies.
        """
        self._command(make, on_done, max(self._step_timeout_s, self._start_timeout_s))

    def load_blocks(self, make: MakeCommand, on_done: OnDone) -> None:
        """Have every rank load or store blocks while steps continue. Completed steps do not extend the deadline.

        Args:
            make: returns the command.
            on_done: called later with the ranks' replies, or with a fault if the workers are lost.
        """
        assert self._group is not None

        def done(reply: CombinedReply) -> None:
            del self._loads_due_s[number]
            on_done(reply)

        number = self._num_loads = self._num_loads + 1
        self._loads_due_s[number] = self._clock() + self._step_timeout_s
        self._commands.command(make, done)

    def _command(self, make: MakeCommand, on_done: OnDone, timeout_s: float) -> None:
        if self._group is None or not self.is_ready:
            on_done(CombinedReply("the workers are restarting; try again later", 1))
            return

        def done(reply: CombinedReply) -> None:
            if not self._scheduler.num_in_flight:
                self._due_s = None
            on_done(reply)

        if self._due_s is None:
            self._due_s = self._clock() + timeout_s
        self._commands.command(make, done)

    def poll(self) -> list[ClientEvent]:
        """Do what is due by now, and return events for the frontends. Never blocks.

        Called before each plan, so that no plan includes a request that may not run.

        Raises:
            WorkerFailed: the workers keep failing and are given up; the root cause.
        """
        is_due = self._due_s is not None and self._clock() >= self._due_s
        if self._ending:
            self._reap()
        if self._state is SupervisionState.STARTING and self._group is not None:
            self._advance(self._group, is_overdue=is_due)
        elif is_due and self._state is SupervisionState.BACKING_OFF:
            self._start()
        elif is_due:
            self._check_timeout()
        elif (due_s := next(iter(self._loads_due_s.values()), None)) is not None and self._clock() >= due_s:
            self._check_loads(due_s)
        # With nothing left to compute, no result will end the pause.
        if self._lost_s is not None and self.is_ready and not self._scheduler.requests:
            self._note_recovery(self._lost_s)
        self._attribution.update()
        if self.is_ready and self._group is not None:
            self._attribution.set_turn(self._group.take_turn(self._attribution.is_isolating, self._is_idle))
        events, self._events = self._events, []
        return events

    def stop(self) -> None:
        """Have all workers exit after the commands sent so far.

        Blocks until: they have ended, for a bounded time.
        """
        if self._group is not None and self.is_ready:
            self._group.stop()

    def kill(self) -> None:
        """Kill all workers, including those of earlier groups.

        Blocks until: they have ended.
        """
        for group in self._ending if self._group is None else [self._group, *self._ending]:
            group.kill()

    def _lose(self, failure: WorkerFailed) -> None:
        """Preempt all requests and schedule the start of the next group.

        Raises:
            WorkerFailed: too many failures without progress; the cause is that of the first failure.
        """
        if self.is_ready and failure.cause != "hung" and self._clock() - self._entered_s >= LONG_LIFE_S:
            self._policy.progress()
        is_elsewhere = failure.cause == "other_engine"  # the other engine counts this failure, and looks for its cause
        decision = RestartDecision(0.0, is_hopeless=False) if is_elsewhere else self._policy.fail(str(failure))
        if decision.is_hopeless:
            raise WorkerFailed(self._policy.root_cause, failure.cause) from failure
        scheduler = self._scheduler
        if self._lost_s is None:
            self._lost_s = self._clock()
        self._interrupted.update(request.key for request in scheduler.running)
        counters = scheduler.counters
        counters.worker_failures[failure.cause] = counters.worker_failures.get(failure.cause, 0) + 1
        if self._group is not None:
            self._group.abandon()
            self._commands.cancel(str(failure))
            self._ending.append(self._group)
            self._group = None
        if failure.computed_ours:
            self._events += self._attribution.record_worker_crash(str(failure))
        else:
            scheduler.lose_workers()
        delay = f" in {decision.delay_s:.1f} s" if decision.delay_s else ""
        num_requests = len(scheduler.requests)
        logger.error("lost the workers: %s. Restarting them%s; %d requests wait", failure, delay, num_requests)
        self._enter(SupervisionState.BACKING_OFF, decision.delay_s)
        self._on_loss()

    def _start(self) -> None:
        try:
            self._group = self._latest = self._latest.restart()
        except (OSError, StartupError) as error:
            self._lose(WorkerFailed(str(error), "not_started"))
            return
        self._commands = WorkerCommands(self._group)
        self._enter(SupervisionState.STARTING, self._start_timeout_s)

    def _advance(self, group: WorkerGroup, *, is_overdue: bool) -> None:
        """Continue the start of a group, once earlier groups have exited: it may need their memory."""
        try:
            is_ready = not self._ending and group.advance(self._plan)
        except WorkerFailed as failure:
            is_elsewhere = failure.cause == "other_engine"
            self._lose(failure if is_elsewhere else WorkerFailed(str(failure), "not_started"))
            return
        self.version += 1
        if is_ready:
            self._enter(SupervisionState.READY, None)
            self._num_joined = 0
            self.on_replaced()
        elif is_overdue:
            reason = f": {group.waits_for}" if group.waits_for else ""
            message = f"the workers were not ready after {self._start_timeout_s:.0f} s{reason}"
            self._lose(WorkerFailed(message, "not_started"))

    def _is_idle(self) -> bool:
        return not any(record.requests for record in self._scheduler.in_flight)

    def _expect_reply(self) -> None:
        """Start the timeout of a reply, unless it is running."""
        if self._due_s is None:
            self._due_s = self._clock() + self._step_timeout_s

    def _check_timeout(self) -> None:
        """Handle an overdue reply: the workers hang, unless this process was suspended too."""
        assert self._due_s is not None
        if self._clock() - self._due_s > SUSPENDED_S:
            self._due_s = self._clock() + self._step_timeout_s
            return
        message = (
            f"the workers have not answered for {self._step_timeout_s:g} s (--execute-model-timeout): they hang, or "
            "need a smaller --max-num-batched-tokens"
        )
        self._lose(WorkerFailed(message, "hung"))

    def _check_loads(self, due_s: float) -> None:
        """Handle an overdue load like `_check_timeout`."""
        if self._clock() - due_s > SUSPENDED_S:
            self._loads_due_s = dict.fromkeys(self._loads_due_s, self._clock() + self._step_timeout_s)
            return
        message = f"the workers have not loaded blocks for {self._step_timeout_s:g} s (--execute-model-timeout)"
        self._lose(WorkerFailed(message, "hung"))

    def _reap(self) -> None:
        left = [group for group in self._ending if not group.has_exited]
        if len(left) < len(self._ending):
            self._ending = left
        self.version += 1

    def _note_recovery(self, lost_s: float) -> None:
        """Record the duration of the outage once the workers compute again, or could."""
        pause_s = self._clock() - lost_s
        self._lost_s = None
        num_resumed = sum(key in self._scheduler.requests for key in self._interrupted)
        self._interrupted.clear()
        counters = self._scheduler.counters
        counters.last_worker_pause_s = pause_s
        counters.requests_resumed += num_resumed
        logger.info("the workers are back after %.2f s; %d requests continue", pause_s, num_resumed)

    def _enter(self, state: SupervisionState, timeout_s: float | None) -> None:
        self._state = state
        self._entered_s = self._clock()
        self._due_s = None if timeout_s is None else self._clock() + timeout_s
        self.version += 1
