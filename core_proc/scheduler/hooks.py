"""`SchedulerHooks`: the features that take part in steps. The step loop calls them and names none of them."""

from collections.abc import Sequence
from typing import Protocol

from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.stop import FinishCause


class StepHook(Protocol):
    """One feature. Grammars are the first."""

    @property
    def wake_fds(self) -> Sequence[int]:
        """File descriptors that become readable when the core process should run an iteration of the loop."""

    def on_step(self) -> list[ClientEvent]:
        """Do what has become possible since the last call, and return events for the frontends.

        Called after each plan, even if nothing was planned, and after each commit. Never blocks.
        """

    def finish_cause(self, request: Request, cause: FinishCause) -> FinishCause:
        """Return why a request finishes that a token or a limit ends: `cause`, or the feature's own cause."""


class SchedulerHooks:
    """The hooks of one scheduler, called in the order in which they were added."""

    def __init__(self) -> None:
        self._hooks: list[StepHook] = []

    def add(self, hook: StepHook) -> None:
        """Register a feature."""
        self._hooks.append(hook)

    @property
    def wake_fds(self) -> list[int]:
        """The file descriptors of all hooks."""
        return [fd for hook in self._hooks for fd in hook.wake_fds]

    def on_step(self) -> list[ClientEvent]:
        """Run every hook and return their events."""
        return [event for hook in self._hooks for event in hook.on_step()]

    def finish_cause(self, request: Request, cause: FinishCause) -> FinishCause:
        """Return why a request finishes; each hook gets the answer of the one before."""
        for hook in self._hooks:
            cause = hook.finish_cause(request, cause)
        return cause
