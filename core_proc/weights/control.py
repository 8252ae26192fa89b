"""`WeightsControl`: pauses, weight updates and sleep. All of these happen between two steps, one after the other.

Each call is a job: a generator that yields the conditions for which it waits. Replaced workers have the weights with
which the engine was started, so later updates are repeated before the next step.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias, assert_never

from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.weights.state import WeightsState
from octavo.core_proc.workers.commands import CombinedReply, CommandExecutor, MakeCommand
from octavo.protocol.events import CallFailed, CallFault, FactsChanged, UtilityResult
from octavo.protocol.weights import (
    WAKE_TAGS,
    GetWeights,
    HoldSteps,
    InitWeightTransfer,
    PauseGeneration,
    PauseMode,
    ResumeGeneration,
    Sleep,
    TransferGroup,
    UpdateWeights,
    WakeUp,
    WeightsCall,
)
from octavo.protocol.worker_commands import (
    AllocateCache,
    JoinWeightTransfer,
    LoadWeights,
    ReleaseMemory,
    RestoreWeights,
    WarmUp,
)

logger = logging.getLogger(__name__)

Condition: TypeAlias = Callable[[], bool]
Job: TypeAlias = Generator[Condition, None, UtilityResult]
Reply: TypeAlias = Callable[[UtilityResult], None]


class WeightsHost(Protocol):
    """What `WeightsControl` needs from the service."""

    @property
    def has_forwarded(self) -> bool:
        """Whether any live request is not held in quarantine."""

    def is_connected(self, client: bytes) -> bool:
        """Return whether a frontend is connected."""

    def abort_all(self) -> None:
        """Abort all live requests with finish reason "abort", now or in later iterations."""

    def hold(self, *, is_open: bool) -> None:
        """Hold new requests back; stop holding them if `is_open`."""

    def deliver(self, events: list[ClientEvent]) -> None:
        """Send events to their frontends."""

    def announce(self, changed: FactsChanged) -> None:
        """Announce the current weights to every frontend, including those that connect later."""


@dataclass(slots=True)
class _Running:
    """A job, the condition for which it waits, and the callback for its result."""

    job: Job
    reply: Reply
    waits_for: Condition = lambda: True


class WeightsControl:
    """Handles calls about weights, and decides whether steps may be planned.

    Args:
        scheduler: holds the requests.
        workers: execute commands.
        state: the state of the weights.
    """

    def __init__(self, scheduler: Scheduler, workers: CommandExecutor, state: WeightsState) -> None:
        self._scheduler = scheduler
        self._workers = workers
        self._state = state
        self._host: WeightsHost | None = None
        self._jobs: deque[_Running] = deque()
        self._restoring: _Running | None = None
        """The job that restores the state in replaced workers. No other job proceeds meanwhile."""
        self._is_changing = False
        """Whether a job requires that no step is planned."""
        self._holders: set[bytes] = set()
        """The frontends that hold steps back."""
        scheduler.weight_version = state.record.version

    def serve(self, host: WeightsHost) -> None:
        """Start: restore the state of the previous core."""
        self._host = host
        host.hold(is_open=self._state.record.pause in (None, "keep"))
        if self._state.record.version or self._state.record.pause or self._state.record.asleep:
            self._state.save()
            self.on_replaced()

    @property
    def facts(self) -> FactsChanged:
        """What frontends must know about the weights."""
        return self._state.facts

    @property
    def refusal(self) -> str:
        """Why new requests are rejected. Empty if they are accepted."""
        return self._state.refusal

    @property
    def may_plan(self) -> bool:
        """Whether steps may be planned."""
        record = self._state.record
        is_stopped = record.pause == "keep" or bool(record.asleep) or bool(record.fault)
        return not (is_stopped or self._is_changing or self._restoring or self._holders)

    @property
    def is_held(self) -> bool:
        """Whether a frontend holds steps back. The service must then detect its disconnection."""
        return bool(self._holders)

    def on_lost(self, client: bytes) -> None:
        """Release the steps that a disconnected frontend holds back."""
        if client in self._holders:
            logger.warning("frontend %s disconnected during an update of several engines; steps continue", client.hex())
            self._holders.discard(client)

    def call(self, client: bytes, call: WeightsCall, reply: Reply) -> None:
        """Queue a frontend's call. `reply` receives its result."""
        match call:
            case GetWeights():
                reply(self._state.status)
                return
            case PauseGeneration(mode, clear_cache):
                job = self._pause(mode, clear_cache=clear_cache)
            case ResumeGeneration():
                job = self._resume()
            case HoldSteps(is_held):
                job = self._hold(client, is_held=is_held)
            case InitWeightTransfer(group):
                job = self._join_transfer(group)
            case UpdateWeights():
                job = self._update(call)
            case Sleep(level, mode):
                job = self._sleep(level, mode)
            case WakeUp(tags):
                job = self._wake_up(list(tags) or list(WAKE_TAGS))
            case _:
                assert_never(call)
        self._jobs.append(_Running(job, reply))

    def on_replaced(self) -> None:
        """Bring new workers, which have the weights from the engine's start, to the current state."""
        record = self._state.record
        fault = self._state.fault_of_start()
        if record.is_lost and not record.is_dropped:
            fault = (
                f"weights of version {record.version} were lost with the workers, because no checkpoint was kept: "
                "update all weights"
            )
        if fault or record.version or record.asleep:
            self._restoring = _Running(self._restore(fault), lambda result: None)

    def advance(self) -> None:
        """Let jobs proceed whose conditions are fulfilled. Never blocks."""
        if self._restoring is not None and self._is_done(self._restoring):
            self._restoring = None
        while self._restoring is None and self._jobs and self._is_done(self._jobs[0]):
            self._jobs.popleft()

    def _is_done(self, running: _Running) -> bool:
        while running.waits_for():
            try:
                running.waits_for = next(running.job)
            except StopIteration as stop:
                running.reply(stop.value)
                return True
        return False

    def _is_quiet(self) -> bool:
        cache = self._scheduler.cache
        # Workers that give up their memory could not respond to these any more.
        has_transfers = bool(cache.loads.in_flight) or (cache.files is not None and cache.files.num_storing > 0)
        return self._workers.is_ready and not self._scheduler.num_in_flight and not has_transfers

    def _command(self, make: MakeCommand) -> Generator[Condition, None, CombinedReply]:
        """Send a command to all ranks and return their combined replies."""
        answers: list[CombinedReply] = []
        self._workers.command(make, answers.append)
        yield lambda: bool(answers)
        return answers[0]

    def _pause(self, mode: PauseMode, *, clear_cache: bool) -> Job:
        assert self._host is not None, "jobs begin after `serve`"
        self._state.save(pause=mode)
        self._host.hold(is_open=mode == "keep")
        if mode == "abort":
            self._host.abort_all()
        if mode == "keep":
            yield self._is_quiet
        else:
            yield lambda: self._is_quiet() and not self._has_forwarded
        if clear_cache:
            self._host.deliver(self._scheduler.set_weights(self._state.record.version, recomputes=True))
        return self._state.status

    @property
    def _has_forwarded(self) -> bool:
        return self._host is not None and self._host.has_forwarded

    def _resume(self) -> Job:
        assert self._host is not None, "jobs begin after `serve`"
        yield lambda: True
        if not self._state.record.asleep:
            self._state.save(pause=None)
            self._host.hold(is_open=True)
        elif self._state.record.pause is not None:
            return CallFailed("the engine is asleep: wake it up", "state")
        return self._state.status

    def _hold(self, client: bytes, *, is_held: bool) -> Job:
        assert self._host is not None, "jobs begin after `serve`"
        self._holders.discard(client)
        if is_held and self._host.is_connected(client):
            self._holders.add(client)
            yield self._is_quiet
        return self._state.status

    def _join_transfer(self, group: TransferGroup) -> Job:
        self._is_changing = True
        try:
            yield self._is_quiet
            joined = yield from self._command(partial(JoinWeightTransfer, group=group))
        finally:
            self._is_changing = False
        return CallFailed(joined.fault) if joined.fault else self._state.status

    def _update(self, call: UpdateWeights) -> Job:
        record = self._state.record
        if call.update_id == record.update_id:  # the previous core could not send the reply
            return self._state.status
        if "weights" in record.asleep:
            return CallFailed(
                "the weights are asleep: wake them up before the update, wake_up(tags=['weights'])", "state"
            )
        if call.is_partial and record.fault:
            return CallFailed(f"a partial update needs all other weights: {record.fault}", "state")
        self._is_changing = True
        try:
            yield self._is_quiet
            load = partial(LoadWeights, path=call.path, is_partial=call.is_partial, transfer=call.transfer)
            checked = yield from self._command(partial(load, is_check=True))
            if checked.fault:
                fault: CallFault = "arguments" if self._workers.is_ready else "engine"
                return CallFailed(f"{checked.fault}; the engine still has version {record.version}", fault)
            if call.is_check:
                return self._state.status
            loaded = yield from self._command(load)
            if loaded.fault:
                return self._broken(loaded)
            self._changed(call, loaded.digest)
        finally:
            self._is_changing = False
        return self._state.status

    def _broken(self, loaded: CombinedReply) -> CallFailed:
        """Handle an update that has failed midway."""
        if not self._workers.is_ready:
            version = self._state.record.version
            return CallFailed(f"{loaded.fault}; the workers come back with version {version} of the weights")
        fault = f"an update of the weights failed, and all of them must be updated again: {loaded.fault}"
        self._refuse(fault)
        return CallFailed(fault)

    def _refuse(self, fault: str) -> None:
        assert self._host is not None, "jobs begin after `serve`"
        logger.error("%s", fault)
        self._state.save(fault=fault, is_dropped=False)
        requests = list(self._scheduler.requests.values())
        self._host.deliver([event for request in requests for event in self._scheduler.fail(request, fault)])

    def _changed(self, call: UpdateWeights, digest: str) -> None:
        """Note that all workers have new weights."""
        assert self._host is not None, "jobs begin after `serve`"
        self._state.update(call, digest)
        self._host.announce(self._state.facts)
        recomputes = call.in_flight == "recompute"
        self._host.deliver(self._scheduler.set_weights(self._state.record.version, recomputes=recomputes))
        source_name = call.path or "from a trainer"
        logger.info("updated the weights to version %d %s: %s", self._state.record.version, call.label, source_name)

    def _sleep(self, level: int, mode: PauseMode) -> Job:
        if self._state.record.asleep:
            return CallFailed(f"the engine is asleep already, at level {self._state.record.sleep_level}", "state")
        if level not in (1, 2):
            return CallFailed(f"there is no sleep of level {level}: use 1 or 2", "arguments")
        yield from self._pause(mode, clear_cache=False)
        self._is_changing = True
        try:
            yield self._is_quiet
            self._scheduler.lose_workers()
            self._state.save(sleep_level=level, asleep=list(WAKE_TAGS))
            if level == 2:
                self._state.save(
                    is_dropped=True, fault="the weights were dropped by sleep(level=2): update all of them"
                )
            answer = yield from self._command(partial(ReleaseMemory, level=level))
        finally:
            self._is_changing = False
        return CallFailed(answer.fault) if answer.fault and self._workers.is_ready else self._state.status

    def _wake_up(self, tags: list[str]) -> Job:
        if unknown := [tag for tag in tags if tag not in WAKE_TAGS]:
            return CallFailed(f"nothing is called {unknown[0]!r}: the tags are {', '.join(WAKE_TAGS)}", "arguments")
        self._is_changing = True
        try:
            for tag in [tag for tag in WAKE_TAGS if tag in tags and tag in self._state.record.asleep]:
                yield self._is_quiet
                answer = yield from self._wake(tag)
                if answer.fault and self._workers.is_ready:
                    return CallFailed(answer.fault)
                self._state.save(asleep=[other for other in self._state.record.asleep if other != tag])
        finally:
            self._is_changing = False
        if not self._state.record.asleep:
            yield from self._resume()
        return self._state.status

    def _wake(self, tag: str) -> Generator[Condition, None, CombinedReply]:
        if tag == "weights":
            return (yield from self._command(RestoreWeights))
        plan = self._workers.cache_plan
        sizes = plan.blocks_per_group, plan.max_model_len, plan.num_host_blocks, plan.num_host_states
        answer = yield from self._command(lambda sequence: AllocateCache(sequence, *sizes))
        return answer if answer.fault else (yield from self._command(WarmUp))

    def _restore(self, fault: str) -> Job:
        """Repeat the updates since the engine's start in new workers, and put them to sleep if their predecessors
        slept.

        Args:
            fault: why the new workers cannot get the current weights. Empty if they can.
        """
        record = self._state.record
        yield self._is_quiet
        fault = fault or (yield from self._repeat_updates())
        if fault:
            if not self._workers.is_ready:
                return self._state.status
            self._refuse(fault)
        if record.asleep:
            level = record.sleep_level if "weights" in record.asleep else 1
            yield from self._command(partial(ReleaseMemory, level=level))
            if "weights" not in record.asleep:
                yield from self._command(RestoreWeights)
        if not fault:
            logger.info("the workers have version %d of the weights again", record.version)
        return self._state.status

    def _repeat_updates(self) -> Generator[Condition, None, str]:
        """Load the checkpoints of all updates again. Return why this has failed, "" if it has not."""
        record = self._state.record
        for source in [] if record.is_dropped else record.sources:
            load = partial(LoadWeights, path=source.path, is_partial=source.is_partial)
            answer = yield from self._command(load)
            fault = answer.fault
            if not fault and answer.digest != source.digest:
                fault = f"{source.path} has changed since it was loaded; update all weights"
            if fault:
                return f"weights of version {record.version} cannot be loaded again: {fault}"
        return ""
