"""The seam between the core and whatever runs its workers: what a group of workers can be asked.

Every command reaches every rank; rank 0 answers steps. A group that has failed stays failed: starting
another is the owner's decision (`core_proc/recovery`).
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from octavo.protocol.config import CachePlan
from octavo.protocol.errors import OctavoError
from octavo.protocol.steps import SlotMask, StepPlan, StepResult

FailureCause: TypeAlias = Literal["exited", "raised", "hung", "not_started"]
"""How a worker failed: it ended, it said that it cannot go on, it gave no sign of life, or it never became ready."""


class WorkerFailed(OctavoError):
    """A worker died, or said that it cannot go on; the message is the root cause."""

    def __init__(self, message: str, cause: FailureCause = "exited") -> None:
        self.cause: FailureCause = cause
        super().__init__(message)


class StepExecutor(Protocol):
    """The part of a group that takes steps and gives their results: what the step loop and the grammars need."""

    def execute(self, plan: StepPlan) -> None:
        """Send a step to every rank. Never blocks."""

    def supply(self, masks: Sequence[SlotMask]) -> None:
        """Send every rank the masks of the oldest step that awaits them and has none. Never blocks."""

    def take_result(self) -> StepResult | None:
        """Return the result of the oldest step that has one, None when none is there. Never blocks.

        Raises:
            WorkerFailed: a worker is gone, or its state cannot be trusted any more.
        """

    def profile(self, directory: str | None, on_done: Callable[[str], None]) -> None:
        """Start (None: stop) the profiler on every rank.

        Args:
            directory: for the profile.
            on_done: called later, with what went wrong, "" when nothing did.
        """


class WorkerGroup(StepExecutor, Protocol):
    """All workers of one model, from their start to their end."""

    @property
    def waitables(self) -> Sequence[Any]:
        """Sockets and file descriptors: one becomes readable when something has happened. They change at `advance`."""

    def advance(self, plan: CachePlan) -> bool:
        """Go on with the start as far as possible without waiting; True when every rank has loaded and has its cache.

        Raises:
            WorkerFailed: a rank did not start.
        """

    def stop(self) -> None:
        """Ask all workers to end when they have done what they were told before.

        Blocks until: they have ended, for a bounded time.
        """

    def abandon(self, why: str) -> None:
        """Kill all workers and listen to them no more; `is_gone` tells when they have ended. Never blocks.

        Args:
            why: told to those that wait for an answer.
        """

    @property
    def is_gone(self) -> bool:
        """True when all workers have ended, and given back their memory."""

    def kill(self) -> None:
        """End all workers at once, those that have ended already included.

        Blocks until: they have ended.
        """
