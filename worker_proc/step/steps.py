"""What the command loop sees of steps, whichever device computes them, and the form they have where the host does."""

from collections.abc import Callable, Sequence
from typing import Protocol

from octavo.protocol.steps import SlotMask, StepPlan, StepResult
from octavo.worker_proc.step.execute import StepExecutor
from octavo.worker_proc.step.forward import Forward

Deliver = Callable[[StepResult], None]
ComesWithin = Callable[[int], object]
"""Waits for so many milliseconds at most; true if something has come."""
TakeMasks = Callable[[], Sequence[SlotMask]]

SMALL_STEP_TOKENS = 16
"""After a step of at most so many tokens a page may be taken too. After larger ones the engine is busy, and all threads
had better take the pages together when they need them."""


class Steps(Protocol):
    """Computes plans in order, and delivers their results in order."""

    @property
    def forward(self) -> Forward | None:
        """What runs the model, for a trace; None: torch's profiler sees all of it."""

    def begin(self, plan: StepPlan, take_masks: TakeMasks) -> None:
        """Compute a plan, or have it computed; its result may be delivered now or later.

        `take_masks` waits for the step's masks and returns them, once the results of all steps before are delivered.

        Raises:
            ProtocolError: the plan or the masks do not fit the batch.
        """

    def fileno(self) -> int | None:
        """Return what becomes readable when `deliver_results` has something to do; None: it never has."""

    def deliver_results(self) -> None:
        """Deliver what has become ready. Never blocks."""

    def drain(self) -> None:
        """Deliver the results of all plans. Blocks until: all are computed."""

    def rest(self, comes_within: ComesWithin) -> None:
        """Do what makes later steps faster once nothing has come for a moment, and stop as soon as something comes."""

    def close(self) -> None:
        """End; no plan may come any more."""


class HostSteps:
    """Steps that are over when `begin` returns; with nothing to compute, memory is taken that later ones will need."""

    def __init__(self, executor: StepExecutor, deliver: Deliver) -> None:
        self._executor = executor
        self._deliver = deliver

    @property
    def forward(self) -> Forward:
        """See `Steps`."""
        return self._executor.forward

    def begin(self, plan: StepPlan, take_masks: TakeMasks) -> None:
        """See `Steps`."""
        self._deliver(self._executor.execute(plan, take_masks))
        pages = self._executor.pages
        if pages.has_wanted and sum(part.num_tokens for part in plan.scheduled) <= SMALL_STEP_TOKENS:
            pages.take_page()

    def fileno(self) -> None:
        """See `Steps`."""

    def deliver_results(self) -> None:
        """See `Steps`; everything has been delivered."""

    def drain(self) -> None:
        """See `Steps`; everything has been delivered."""

    def rest(self, comes_within: ComesWithin) -> None:
        """See `Steps`."""
        self._executor.pages.take_pages(comes_within)

    def close(self) -> None:
        """See `Steps`."""
