"""A scheduler and a `WorkerSupervisor` over simulated workers that fail on request. One thread, no sockets."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from client_events import by_request
from core_fakes import CLIENT, Output, cache_plan, core_config
from simulation.crash_journal import SimulatedCrashJournal
from simulation.worker import SimulatedWorker

from octavo.core_proc import invariants
from octavo.core_proc.log_entries import LogEntry, Planned, WorkersLost
from octavo.core_proc.recovery.crash_attribution import CrashAttribution
from octavo.core_proc.recovery.supervisor import WorkerSupervisor
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.observed import ObservedScheduler
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.workers.group import FailureCause, Turn, WorkerFailed
from octavo.protocol.config import CachePlan, DeviceFacts, ResolvedConfig
from octavo.protocol.events import Tokens
from octavo.protocol.lifecycle import StartupReporter, StopSignal
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit
from octavo.protocol.steps import StepPlan
from octavo.protocol.worker_commands import Acknowledged, Profile, WorkerCommand, WorkerReply

STEP_TIMEOUT_S = 10.0
START_TIMEOUT_S = 60.0
FACTS = DeviceFacts(
    rank=0, device_name="none", total_bytes=0, free_bytes=0, weights_bytes=0, activation_bytes=0, cache_groups=[]
)


@dataclass
class Faults:
    """Failures of the worker groups of one engine."""

    is_fatal: Callable[[StepPlan, SimulatedWorker], bool] = lambda plan, worker: False
    """Called with each step before it is computed; `True` kills the group."""
    hangs_at: set[tuple[int, int]] = field(default_factory=set)
    """(group, step of the group) of steps that never end."""
    failed_starts: set[int] = field(default_factory=set)
    """Groups that never become ready, and report a failure."""
    silent_starts: set[int] = field(default_factory=set)
    """Groups that never become ready, and report nothing."""
    is_mute: bool = False
    """Whether groups never acknowledge `Profile`."""
    unmade: set[int] = field(default_factory=set)
    """Groups whose processes cannot be started."""


class MortalGroup:
    """Simulated workers of one generation. Ready at the second poll; gone at the second poll after their end."""

    def __init__(
        self,
        number: int,
        config: ResolvedConfig,
        plan: CachePlan,
        faults: Faults,
        make_next: Callable[[int], "MortalGroup"],
    ) -> None:
        self.number = number
        self.worker = SimulatedWorker(config, plan.num_blocks, plan.cache_groups, plan.num_host_blocks)
        self.waitables: list[Any] = []
        self.facts = [FACTS]
        self.waits_for = ""
        self.num_joined = 0
        self.next_sequence = 0
        self.is_abandoned = False
        self._faults = faults
        self._make_next = make_next
        self.looks_left = 1
        self._replies: deque[WorkerReply] = deque()
        self._failure: WorkerFailed | None = None
        self._num_steps = 0

    @property
    def has_exited(self) -> bool:
        self.looks_left -= 1
        return self.looks_left < 0

    def start(self, reporter: StartupReporter, stop: StopSignal) -> None:
        raise AssertionError("the first group is ready")

    def allocate(self, plan: CachePlan, stop: StopSignal) -> None:
        raise AssertionError("the first group is ready")

    def warm_up(self, stop: StopSignal) -> None:
        raise AssertionError("the first group is ready")

    def advance(self, plan: CachePlan) -> bool:
        if self.number in self._faults.failed_starts:
            raise WorkerFailed(f"group {self.number} does not start", "not_started")
        self.looks_left -= self.number not in self._faults.silent_starts
        return self.looks_left < 0

    def broadcast(self, command: WorkerCommand) -> None:
        assert not self.is_abandoned
        assert command.sequence == self.next_sequence
        self.next_sequence += 1
        self.worker.next_sequence = command.sequence
        match command:
            case StepPlan():
                self._execute(command)
            case Profile():
                if not self._faults.is_mute:
                    self._replies.append(Acknowledged(command.sequence, 0))
            case _:
                raise AssertionError("no request has a grammar")

    def join_steps(self) -> None:
        """Do nothing: no other engine needs these workers."""

    def take_turn(self, wants_turn: bool, is_idle: Callable[[], bool]) -> Turn:
        """Return a turn without other engines: none of their requests are in our steps."""
        return Turn.OWN

    def gather(self) -> WorkerReply | None:
        if self._replies:
            return self._replies.popleft()
        if self._failure:
            raise self._failure
        return None

    def restart(self) -> "MortalGroup":
        return self._make_next(self.number + 1)

    def die(self, cause: FailureCause = "exited") -> None:
        """Stop, even in the middle of a step."""
        self._failure = WorkerFailed(f"group {self.number} died", cause, computed_ours=cause != "other_engine")
        self._replies.clear()

    def abandon(self) -> None:
        self.is_abandoned = True
        self.looks_left = 1

    def stop(self) -> None:
        self.is_abandoned = True

    def kill(self) -> None:
        self.is_abandoned = True

    def _execute(self, plan: StepPlan) -> None:
        self._num_steps += 1
        if self._failure or (self.number, self._num_steps) in self._faults.hangs_at:
            self._faults.hangs_at.add((self.number, self._num_steps + 1))
        elif self._faults.is_fatal(plan, self.worker):
            self._failure = WorkerFailed(f"group {self.number} died")
        else:
            self._replies.append(self.worker.execute(plan))


class MortalEngine:
    """An engine whose workers fail; only `turn` advances `now`."""

    def __init__(self, faults: Faults, *, num_blocks: int = 64, max_restarts: int = 8, **changes: Any) -> None:
        self.config = core_config(**changes)
        self.plan = cache_plan(self.config, num_blocks)
        self.faults = faults
        self.now = 100.0
        self.groups: list[MortalGroup] = []
        self.outputs: dict[str, Output] = {}
        self.num_losses = 0
        self.scheduler = ObservedScheduler(self.config, self.plan, lambda: self.now, [self._check])
        self.attribution = CrashAttribution(self.scheduler, SimulatedCrashJournal())
        self.supervisor = WorkerSupervisor(
            self._make_group(0),
            self.plan,
            self.scheduler,
            self.attribution,
            lambda: self.now,
            step_timeout_s=STEP_TIMEOUT_S,
            start_timeout_s=START_TIMEOUT_S,
            max_restarts=max_restarts,
            on_loss=lambda: None,
        )

    def submit(self, request_id: str, prompt: list[int], max_tokens: int, **fields: Any) -> None:
        """Queue a request."""
        self.outputs[request_id] = Output()
        sampling = SamplingSpec(max_tokens=max_tokens, seed=0, **fields)
        submit = Submit(request_id, prompt, sampling)
        self.attribution.add(request_id.encode(), (CLIENT, request_id))
        self.attribution.track((CLIENT, request_id), submit)
        self.take(self.scheduler.submit(CLIENT, submit))

    def turn(self) -> None:
        """Run one iteration of the core's loop. If there is no message, advance time to the next deadline."""
        if (result := self.supervisor.take_result()) is not None:
            self.take(self.scheduler.commit(result))
        elif (timeout_s := self.supervisor.timeout_s) is not None:
            self.now += min(timeout_s, 1.0)
        self.take(self.supervisor.poll())
        while self.supervisor.is_ready and self.scheduler.may_plan(2) and (plan := self.scheduler.plan()) is not None:
            self.supervisor.execute(plan)

    def run(self) -> None:
        """Run until every request has ended."""
        for _ in range(20_000):
            if not self.scheduler.has_requests:
                return
            self.turn()
        raise AssertionError("the engine does not finish")

    def _make_group(self, number: int) -> MortalGroup:
        assert all(group.is_abandoned for group in self.groups), "two groups at the same time"
        if number in self.faults.unmade:
            self.faults.unmade.remove(number)
            raise OSError("no process can be started")
        assert number == len(self.groups)
        group = MortalGroup(number, self.config, self.plan, self.faults, self._make_group)
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
        for client, event in by_request(events):
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
                self.attribution.finish((client, event.request_id))
