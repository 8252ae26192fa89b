"""The interface between the core and its workers, which run on this machine or in a cluster.

A group is a transport: it starts workers, broadcasts commands and gathers replies. `commands.py` defines what commands
and replies mean, for any group. A failed group stays failed; its owner decides when to restart (`core_proc/recovery`).
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Literal, Protocol, TypeAlias

from octavo.protocol.config import CachePlan, DeviceFacts
from octavo.protocol.errors import OctavoError
from octavo.protocol.lifecycle import StartupReporter, StopSignal
from octavo.protocol.worker_commands import WorkerCommand, WorkerReply

FailureCause: TypeAlias = Literal["exited", "raised", "hung", "not_started", "other_engine"]
"""How a worker failed: its process exited, it reported an error, it stopped responding, or it never became ready.
"other_engine" means that a worker of another engine has failed, without which ours cannot compute."""


class Turn(Enum):
    """Which requests an engine may run if its steps are shared with other engines: see `isolation.py`."""

    ALL = "all"
    """All requests; other engines may run theirs too."""
    OWN = "own"
    """All requests, while no other engine runs any."""
    NONE = "none"


class WorkerFailed(OctavoError):
    """A worker has died or reported an unrecoverable error. The message is the root cause."""

    def __init__(self, message: str, cause: FailureCause = "exited", *, computed_ours: bool = True) -> None:
        self.cause: FailureCause = cause
        self.computed_ours = computed_ours
        """Whether one of this engine's requests may be the cause."""
        super().__init__(message)


class WorkerGroup(Protocol):
    """All workers of one model, from start to end.

    The first group of an engine is started by the blocking methods `start`, `allocate` and `warm_up`. Each later group
    comes from `restart` and becomes ready through calls of `advance`, so that the step loop continues meanwhile.
    """

    @property
    def facts(self) -> list[DeviceFacts]:
        """What each rank measured, ordered by rank. Complete once the group has started."""

    @property
    def waitables(self) -> Sequence[Any]:
        """Sockets and file descriptors that become readable on events. `advance` may change them."""

    @property
    def next_sequence(self) -> int:
        """The sequence number that the next command must have. Every group counts from 0."""

    @property
    def waits_for(self) -> str:
        """What the start is waiting for, such as machines, for messages. Empty if for nothing."""

    def start(self, reporter: StartupReporter, stop: StopSignal) -> None:
        """Wait until the workers have loaded, and forward their progress to our parent process.

        Blocks until: all are ready to receive commands.

        Raises:
            StartupError: a worker failed (its root cause), or we were told to stop.
        """

    def allocate(self, plan: CachePlan, stop: StopSignal) -> None:
        """Have every rank allocate its part of the cache.

        Blocks until: all have done so.

        Raises:
            StartupError: a rank could not (its root cause), or we were told to stop.
        """

    def warm_up(self, stop: StopSignal) -> None:
        """Have all ranks warm up at once, so that steps need not wait for it later.

        Blocks until: all have done so.

        Raises:
            StartupError: a rank could not (its root cause), or we were told to stop.
        """

    def advance(self, plan: CachePlan) -> bool:
        """Do the next part of `start`, `allocate` and `warm_up` without blocking. Return True once every rank is ready.

        Raises:
            WorkerFailed: a rank did not start.
        """

    def broadcast(self, command: WorkerCommand) -> None:
        """Send a command to every rank; no command is lost. Never blocks."""

    def join_steps(self) -> None:
        """Join steps that other engines have begun, because there is nothing to plan here. Never blocks."""

    def take_turn(self, wants_turn: bool, is_idle: Callable[[], bool]) -> Turn:
        """Return which requests may run. Engines that share steps isolate their crash suspects one after another.

        Never blocks.

        Args:
            wants_turn: whether we have suspects to isolate.
            is_idle: whether no step in flight contains a request.
        """

    @property
    def num_joined(self) -> int:
        """Number of other engines' steps that finished without requests of ours."""

    def gather(self) -> WorkerReply | None:
        """Return the next reply of any rank. Return None if there is none. Never blocks.

        Raises:
            WorkerFailed: a worker has died, or its state is unreliable.
        """

    def restart(self) -> "WorkerGroup":
        """Return the next group of the same engine. Its workers are starting and skip measurements. Never blocks.

        Raises:
            StartupError, OSError: its processes cannot be started.
        """

    def stop(self) -> None:
        """Have all workers exit after the commands sent so far.

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
