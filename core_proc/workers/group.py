"""The interface between the core and its workers, which may be processes of this machine or of a cluster.

A group is a transport: it starts workers, broadcasts commands, and gathers replies. What commands and replies mean is
in `commands.py`, which works over any group. A group that has failed stays failed; its owner decides when to restart
(`core_proc/recovery`).
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Literal, Protocol, TypeAlias

from octavo.protocol.config import CachePlan, DeviceFacts
from octavo.protocol.errors import OctavoError
from octavo.protocol.lifecycle import StartupReporter, StopSignal
from octavo.protocol.worker_commands import WorkerCommand, WorkerReply

FailureCause: TypeAlias = Literal["exited", "raised", "hung", "not_started", "other_engine"]
"""How a worker failed: its process ended, it reported an error, it stopped answering, or it never became ready; or a
worker of another engine has, without which ours cannot compute."""


class Turn(Enum):
    """Which requests an engine may run, if its steps are also those of other engines: see `isolation.py`."""

    ALL = "all"
    """Any, and so may other engines."""
    OWN = "own"
    """Any, and no other engine runs one."""
    NONE = "none"


class WorkerFailed(OctavoError):
    """A worker died, or reported an error that it cannot recover from; the message is the root cause."""

    def __init__(self, message: str, cause: FailureCause = "exited", *, computed_ours: bool = True) -> None:
        self.cause: FailureCause = cause
        self.computed_ours = computed_ours
        """Whether one of our requests may be the reason."""
        super().__init__(message)


class WorkerGroup(Protocol):
    """All workers of one model, from their start to their end.

    The first group of an engine is started with `start`, `allocate` and `warm_up`, which block. Each later one comes
    from `restart` and becomes ready by calls of `advance`, so that the step loop keeps turning meanwhile.
    """

    @property
    def facts(self) -> list[DeviceFacts]:
        """What each rank measured, in order of rank; complete once the group has started."""

    @property
    def waitables(self) -> Sequence[Any]:
        """Sockets and file descriptors that become readable when something has happened. `advance` may change them."""

    @property
    def next_sequence(self) -> int:
        """The number that the next command must have. Every group counts from 0."""

    @property
    def waits_for(self) -> str:
        """What a start lacks besides time, such as machines, for messages; "": nothing."""

    def start(self, reporter: StartupReporter, stop: StopSignal) -> None:
        """Wait for the workers to load, passing their progress on to our own parent.

        Blocks until: all are ready to receive commands.

        Raises:
            StartupError: one failed (its root cause), or we were told to stop.
        """

    def allocate(self, plan: CachePlan, stop: StopSignal) -> None:
        """Have every rank allocate its part of the cache.

        Blocks until: all have done so.

        Raises:
            StartupError: a rank could not (its root cause), or we were told to stop.
        """

    def warm_up(self, stop: StopSignal) -> None:
        """Have every rank do what its steps would otherwise wait for, all of them at once.

        Blocks until: all have done so.

        Raises:
            StartupError: a rank could not (its root cause), or we were told to stop.
        """

    def advance(self, plan: CachePlan) -> bool:
        """Do the next part of `start`, `allocate` and `warm_up` without blocking; True once every rank is ready.

        Raises:
            WorkerFailed: a rank did not start.
        """

    def broadcast(self, command: WorkerCommand) -> None:
        """Send a command to every rank, none is lost. Never blocks."""

    def join_steps(self) -> None:
        """Take part in steps that other engines have begun, now that there is nothing to plan. Never blocks."""

    def take_turn(self, wants_turn: bool, is_idle: Callable[[], bool]) -> Turn:
        """Return which requests may run, as engines that compute their steps together isolate crash suspects in turn.

        Never blocks.

        Args:
            wants_turn: whether we have suspects to isolate.
            is_idle: whether no step in flight has a request.
        """

    @property
    def num_joined(self) -> int:
        """Steps of other engines that were finished without requests of ours."""

    def gather(self) -> WorkerReply | None:
        """Return the next reply of any rank, None when there is none. Never blocks.

        Raises:
            WorkerFailed: a worker is gone, or its state cannot be trusted any more.
        """

    def restart(self) -> "WorkerGroup":
        """Return the next group of the same engine, whose workers start and need not measure. Never blocks.

        Raises:
            StartupError, OSError: its processes cannot be started.
        """

    def stop(self) -> None:
        """Have all workers exit after the commands that were sent before.

        Blocks until: they have ended, for a bounded time.
        """

    def abandon(self) -> None:
        """Kill all workers and close the connections to them. Never blocks; `has_exited` tells when they have ended."""

    @property
    def has_exited(self) -> bool:
        """True once all workers have ended and their memory is free."""

    def kill(self) -> None:
        """Kill all workers.

        Blocks until: they have ended.
        """
