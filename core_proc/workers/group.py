"""The seam between the core and whatever runs its workers: what a group of workers can be asked.

Every command reaches every rank; rank 0 answers steps. A group that has failed stays failed: starting
another is the owner's decision.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from octavo.protocol.config import CachePlan, DeviceFacts
from octavo.protocol.errors import OctavoError
from octavo.protocol.lifecycle import StopSignal
from octavo.protocol.steps import SlotMask, StepPlan, StepResult


class WorkerFailed(OctavoError):
    """A worker died, or said that it cannot go on; the message is the root cause."""


class WorkerGroup(Protocol):
    """All workers of one model, started and measured."""

    @property
    def facts(self) -> Sequence[DeviceFacts]:
        """What each rank measured, in order of rank."""

    @property
    def waitables(self) -> Sequence[Any]:
        """Sockets and file descriptors: one becomes readable when `take_result` has something to do."""

    def allocate(self, plan: CachePlan, stop: StopSignal) -> None:
        """Make the KV tensors.

        Blocks until: every rank has them.

        Raises:
            StartupError: a rank could not (its root cause), or this process was told to stop.
        """

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

        `on_done` is called from a later `take_result`, with what went wrong; "" when nothing did.
        """

    def stop(self) -> None:
        """Ask all workers to end when they have done what they were told before.

        Blocks until: they have ended, for a bounded time.
        """

    def kill(self) -> None:
        """End all workers at once, those that have ended already included."""
