"""A scheduler and a `WorkerSupervisor` over simulated workers that fail as a test wants. One thread, no sockets."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from core_fakes import CLIENT, Output, cache_plan, core_config
from simulation.box import SimulatedBox
from simulation.worker import SimulatedWorker

from octavo.core_proc import invariants
from octavo.core_proc.log_entries import LogEntry, Planned, WorkersLost
from octavo.core_proc.recovery.blame import Blame
from octavo.core_proc.recovery.supervisor import WorkerSupervisor
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.observed import ObservedScheduler
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.workers.group import WorkerFailed
from octavo.protocol.config import CachePlan, ResolvedConfig
from octavo.protocol.events import Tokens
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit
from octavo.protocol.steps import SlotMask, StepPlan, StepResult

STEP_TIMEOUT_S = 10.0
START_TIMEOUT_S = 60.0


@dataclass
class Faults:
    """What goes wrong with the groups of one engine."""

    is_fatal: Callable[[StepPlan, SimulatedWorker], bool] = lambda plan, worker: False
    """Asked of each step before it is computed: True ends the group."""
    hangs_at: set[tuple[int, int]] = field(default_factory=set)
    """(group, step of the group) that never ends."""
    failed_starts: set[int] = field(default_factory=set)
    """Groups that never become ready, and say so."""
    silent_starts: set[int] = field(default_factory=set)
    """Groups that never become ready, and say nothing."""
    is_mute: bool = False
    """Groups never say that they profile."""
    unmade: set[int] = field(default_factory=set)
    """Groups whose processes cannot even be started."""


class MortalGroup:
    """Simulated workers of one generation; ready at the second look, gone at the second look after their end."""

    def __init__(self, number: int, config: ResolvedConfig, plan: CachePlan, faults: Faults) -> None:
        self.number = number
        self.worker = SimulatedWorker(config, plan.num_blocks)
        self.waitables: list[Any] = []
        self.is_abandoned = False
        self._faults = faults
        self.looks_left = 1
        self._results: deque[StepResult] = deque()
        self._failure: WorkerFailed | None = None
        self._num_steps = 0
        self._on_done: Callable[[str], None] = lambda why: None

    @property
    def is_gone(self) -> bool:
        self.looks_left -= 1
        return self.looks_left < 0

    def advance(self, plan: CachePlan) -> bool:
        if self.number in self._faults.failed_starts:
            raise WorkerFailed(f"group {self.number} does not start", "not_started")
        self.looks_left -= self.number not in self._faults.silent_starts
        return self.looks_left < 0

    def execute(self, plan: StepPlan) -> None:
        assert not self.is_abandoned
        self._num_steps += 1
        if self._failure or (self.number, self._num_steps) in self._faults.hangs_at:
            self._faults.hangs_at.add((self.number, self._num_steps + 1))
            return
        plan = StepPlan(self._num_steps - 1, *[getattr(plan, name) for name in StepPlan.__struct_fields__[1:]])
        if self._faults.is_fatal(plan, self.worker):
            self._failure = WorkerFailed(f"group {self.number} died")
            return
        self._results.append(self.worker.execute(plan))

    def supply(self, masks: Sequence[SlotMask]) -> None:
        raise AssertionError("no request has a grammar")

    def take_result(self) -> StepResult | None:
        if self._results:
            return self._results.popleft()
        if self._failure:
            raise self._failure
        return None

    def profile(self, directory: str | None, on_done: Callable[[str], None]) -> None:
        if self._faults.is_mute:
            self._on_done = on_done
        else:
            on_done("")

    def die(self) -> None:
        """End, whatever it is doing."""
        self._failure = WorkerFailed(f"group {self.number} died")

    def abandon(self, why: str) -> None:
        self.is_abandoned = True
        self.looks_left = 1
        self._on_done(why)

    def stop(self) -> None:
        self.is_abandoned = True

    def kill(self) -> None:
        self.is_abandoned = True


class MortalEngine:
    """An engine whose workers fail; `now` moves only by `turn`."""

    def __init__(self, faults: Faults, *, num_blocks: int = 64, max_restarts: int = 8, **changes: Any) -> None:
        self.config = core_config(**changes)
        self.plan = cache_plan(self.config, num_blocks)
        self.faults = faults
        self.now = 100.0
        self.groups: list[MortalGroup] = []
        self.outputs: dict[str, Output] = {}
        self.num_losses = 0
        self.scheduler = ObservedScheduler(self.config, self.plan, lambda: self.now, [self._check])
        self.blame = Blame(self.scheduler, SimulatedBox())
        self._sequences: deque[int] = deque()
        self.supervisor = WorkerSupervisor(
            self._first_group(),
            self._make_group,
            self.plan,
            self.scheduler,
            self.blame,
            lambda: self.now,
            step_timeout_s=STEP_TIMEOUT_S,
            start_timeout_s=START_TIMEOUT_S,
            max_restarts=max_restarts,
            on_loss=self._sequences.clear,
        )

    def submit(self, request_id: str, prompt: list[int], max_tokens: int, **fields: Any) -> None:
        """Queue a request."""
        self.outputs[request_id] = Output()
        sampling = SamplingSpec(max_tokens=max_tokens, seed=0, **fields)
        submit = Submit(request_id, prompt, sampling)
        self.blame.arrive(request_id.encode())
        self.blame.take_in(request_id.encode(), (CLIENT, request_id), submit)
        self.take(self.scheduler.submit(CLIENT, submit))

    def turn(self) -> None:
        """Do what the core's loop does in one turn; when nothing has come, time passes until something is due."""
        if (result := self.supervisor.take_result()) is not None:
            renumbered = [getattr(result, name) for name in StepResult.__struct_fields__[1:]]
            self.take(self.scheduler.commit(StepResult(self._sequences.popleft(), *renumbered)))
        elif (timeout_s := self.supervisor.timeout_s) is not None:
            self.now += min(timeout_s, 1.0)
        self.take(self.supervisor.tend())
        while self.supervisor.is_ready and self.scheduler.may_plan(2) and (plan := self.scheduler.plan()) is not None:
            self._sequences.append(plan.sequence)
            self.supervisor.execute(plan)

    def run(self) -> None:
        """Run until every request has ended."""
        for _ in range(20_000):
            if not self.scheduler.has_requests:
                return
            self.turn()
        raise AssertionError("the engine does not come to an end")

    def _first_group(self) -> MortalGroup:
        group = MortalGroup(0, self.config, self.plan, self.faults)
        self.groups.append(group)
        return group

    def _make_group(self, number: int) -> MortalGroup:
        assert all(group.is_abandoned for group in self.groups), "two groups at the same time"
        if number in self.faults.unmade:
            self.faults.unmade.remove(number)
            raise OSError("no process can be started")
        assert number == len(self.groups)
        group = MortalGroup(number, self.config, self.plan, self.faults)
        self.groups.append(group)
        return group

    def _check(self, scheduler: Scheduler, entry: LogEntry) -> None:
        if isinstance(entry, WorkersLost):
            self.num_losses += 1
            invariants.check_loss(scheduler)
        elif isinstance(entry, Planned):
            invariants.check_plan(scheduler, entry.plan)
        else:
            invariants.check(scheduler)

    def take(self, events: list[ClientEvent]) -> None:
        for client, event in events:
            output = self.outputs[event.request_id]
            assert output.end is None, "an event after the last one"
            if isinstance(event, Tokens):
                output.token_ids += event.token_ids
                output.logprobs += event.logprobs or []
                if event.prompt_logprobs is not None:
                    assert output.prompt_logprobs is None
                    output.prompt_logprobs = event.prompt_logprobs
            else:
                output.end = event
                self.blame.release((client, event.request_id))
