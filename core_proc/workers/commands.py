"""`WorkerCommands`: sends steps, masks and profiles as commands to a group of workers, and receives their replies.

Works with any `WorkerGroup`. Every command reaches every rank; one rank replies to steps.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec

from octavo.core_proc.workers.group import WorkerFailed, WorkerGroup
from octavo.protocol.config import CachePlan
from octavo.protocol.errors import ProtocolError
from octavo.protocol.ids import BlockId
from octavo.protocol.steps import StepPlan, StepResult, TokenMask, TokenMasks
from octavo.protocol.worker_commands import Acknowledged, BlocksLoaded, CacheReady, Profile, WarmedUp, WorkerCommand

MakeCommand: TypeAlias = Callable[[int], WorkerCommand]
"""Returns the command with this sequence number."""


@dataclass(slots=True)
class CombinedReply:
    """The combined replies of all ranks to a command."""

    fault: str = ""
    """The first error, with its rank. Empty if no rank has failed."""
    num_faults: int = 0
    digest: str = ""
    """See `Acknowledged.digest`."""
    missing: set[BlockId] = field(default_factory=set)
    """See `BlocksLoaded.missing`; the union over all ranks."""
    missing_states: set[BlockId] = field(default_factory=set)
    """See `BlocksLoaded.missing_states`; the union over all ranks."""
    elapsed_s: float = 0.0
    """See `BlocksLoaded.elapsed_s`; that of the slowest rank."""


OnDone: TypeAlias = Callable[[CombinedReply], None]


@dataclass(slots=True)
class _Pending:
    num_missing: int
    on_done: OnDone
    combined: CombinedReply = field(default_factory=CombinedReply)


class StepExecutor(Protocol):
    """What the step loop and its hooks can do with the workers, whether they are running now or not."""

    def execute(self, plan: StepPlan) -> None:
        """Send a step to every rank. Never blocks."""

    def send_masks(self, masks: Sequence[TokenMask]) -> None:
        """Send every rank the masks of the oldest step that still awaits them. Never blocks."""

    def take_result(self) -> StepResult | None:
        """Return the result of the oldest step that has one. Return None if there is none. Never blocks.

        Raises:
            WorkerFailed: a worker has died, or its state is unreliable.
        """

    def profile(self, directory: str | None, on_done: Callable[[str], None]) -> None:
        """Start the profiler on every rank, or stop it if `directory` is None.

        Args:
            directory: directory of the profile.
            on_done: called now or later with an error message, "" for success.
        """


class CommandExecutor(StepExecutor, Protocol):
    """The part of the workers' interface that `WeightsControl` uses."""

    @property
    def is_ready(self) -> bool:
        """True while commands may be sent."""

    @property
    def cache_plan(self) -> CachePlan:
        """The cache plan according to which the workers allocate."""

    def command(self, make: MakeCommand, on_done: OnDone) -> None:
        """Send every rank a command that computes nothing.

        Args:
            make: returns the command.
            on_done: called now or later with the ranks' replies.
        """


class WorkerCommands:
    """The commands sent to one group that were not yet replied to."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._steps: deque[tuple[int, int]] = deque()
        """Steps in flight: sequence number of the command, number of the step."""
        self._pending: dict[int, _Pending] = {}
        """Commands other than steps that not all ranks have replied to, by sequence number, oldest first."""

    def execute(self, plan: StepPlan) -> None:
        """Send a step to every rank. Never blocks."""
        sequence = self._group.next_sequence
        self._steps.append((sequence, plan.sequence))
        if sequence != plan.sequence:  # the sequence also counts other commands
            plan = msgspec.structs.replace(plan, sequence=sequence)
        self._group.broadcast(plan)

    def send_masks(self, masks: Sequence[TokenMask]) -> None:
        """Send every rank the masks of the oldest step that still awaits them. Never blocks."""
        self._group.broadcast(TokenMasks.pack(self._group.next_sequence, masks))

    def take_result(self) -> StepResult | None:
        """Return the result of the oldest step that has one. Return None if there is none. Never blocks.

        Raises:
            WorkerFailed: a worker has died, or its state is unreliable.
        """
        while (reply := self._group.gather()) is not None:
            try:
                match reply:
                    case StepResult():
                        return self._renumbered(reply)
                    case Acknowledged() | BlocksLoaded() | CacheReady() | WarmedUp():
                        self._acknowledge(reply)
                    case _:
                        raise ProtocolError(f"worker {reply.rank} sent an unexpected {type(reply).__name__}")
            except ProtocolError as error:  # a healthy worker never sends this
                raise WorkerFailed(str(error), "raised") from error
        return None

    def profile(self, directory: str | None, on_done: Callable[[str], None]) -> None:
        """Start the profiler on every rank, or stop it if `directory` is None.

        Args:
            directory: directory of the profile.
            on_done: called from a later `take_result` or `cancel` with an error message, "" for success.
        """
        self.command(lambda sequence: Profile(sequence, directory), lambda combined: on_done(combined.fault))

    def command(self, make: MakeCommand, on_done: OnDone) -> None:
        """Send every rank a command that computes nothing.

        Args:
            make: returns the command.
            on_done: called from a later `take_result` or `cancel` with the ranks' replies.
        """
        sequence = self._group.next_sequence
        self._group.broadcast(make(sequence))
        self._pending[sequence] = _Pending(len(self._group.facts), on_done)

    def cancel(self, why: str) -> None:
        """Fail all pending commands: the group has ended and no reply will come.

        Args:
            why: passed to the callbacks as the fault.
        """
        self._steps.clear()
        pending, self._pending = self._pending, {}
        for one in pending.values():
            one.on_done(CombinedReply(why, len(self._group.facts)))

    def _renumbered(self, result: StepResult) -> StepResult:
        """Return the result with the number of its step. On the wire it has the number of its command."""
        if not self._steps or self._steps[0][0] != result.sequence:
            raise ProtocolError(f"result of command {result.sequence}, which is not the oldest step in flight")
        sequence, step = self._steps.popleft()
        return result if sequence == step else msgspec.structs.replace(result, sequence=step)

    def _acknowledge(self, reply: Acknowledged | BlocksLoaded | CacheReady | WarmedUp) -> None:
        pending = self._pending.get(reply.sequence)
        if pending is None:
            raise ProtocolError(f"worker {reply.rank} acknowledged a command that was not sent")
        pending.num_missing -= 1
        combined = pending.combined
        if isinstance(reply, BlocksLoaded):
            combined.missing.update(reply.missing)
            combined.missing_states.update(reply.missing_states)
            combined.elapsed_s = max(combined.elapsed_s, reply.elapsed_s)
        if isinstance(reply, Acknowledged):
            if reply.fault:
                combined.num_faults += 1
                combined.fault = combined.fault or f"worker {reply.rank}: {reply.fault}"
            combined.digest = combined.digest or reply.digest
        if not pending.num_missing:
            del self._pending[reply.sequence]
            pending.on_done(pending.combined)
