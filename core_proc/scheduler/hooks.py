"""`SchedulerHooks`: features that take part in steps. The step loop calls the hooks and names no feature."""

from collections.abc import Sequence
from typing import Protocol

from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.stop import FinishCause


class StepHook(Protocol):
    """The interface of one feature, for example grammars."""

    @property
    def wake_fds(self) -> Sequence[int]:
        """File descriptors that become readable when the core process should run a loop iteration."""

    def on_step(self) -> list[ClientEvent]:
        """Do what has become possible since the last call, and return events for the frontends.

        Called after each plan, even if nothing was planned, and after each commit. Never blocks.
        """

    def finish_cause(self, request: Request, cause: FinishCause) -> FinishCause:
        """Return why a request finishes that was ended by a token or a limit: `cause`, or the feature's own cause."""


class SchedulerHooks:
    """The hooks of one scheduler, called in registration order."""

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
        """Return why a request finishes. Each hook receives the result of the previous one."""
        for hook in self._hooks:
            cause = hook.finish_cause(request, cause)
        return cause
