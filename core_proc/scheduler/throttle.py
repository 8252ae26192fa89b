"""When a step is planned ahead, and when decodes wait for prompts. Counts tokens; has no clock."""

from collections.abc import Sequence

from octavo.core_proc.scheduler.delta import StepRecord


def may_plan(in_flight: Sequence[StepRecord], depth: int, full_step_tokens: int) -> bool:
    """Return whether another step may be planned now.

    Planning ahead saves the workers the short gap between two steps, but a request that arrives meanwhile waits one
    step longer. So nothing is planned while a full step is in flight.

    Args:
        in_flight: the steps that are not committed.
        depth: most steps in flight.
        full_step_tokens: a step of this many tokens is full; 0: no step is.
    """
    if not in_flight or len(in_flight) >= depth:
        return not in_flight
    return not full_step_tokens or sum(record.num_tokens for record in in_flight) < full_step_tokens


class DecodeThrottle:
    """Holds decodes back for prompts that are about to complete, for a bounded number of tokens.

    Args:
        interval_tokens: prompt tokens after which decodes run in any case; 0: they run in every step.
    """

    def __init__(self, interval_tokens: int) -> None:
        self._interval_tokens = interval_tokens
        self._num_tokens = 0
        """Prompt tokens since the last step with decodes."""

    @property
    def can_defer(self) -> bool:
        """True while decodes may wait."""
        return self._num_tokens < self._interval_tokens

    def count(self, num_prompt_tokens: int, *, leaves_decodes: bool) -> None:
        """Count a step, and whether it left decodes waiting."""
        self._num_tokens = self._num_tokens + num_prompt_tokens if leaves_decodes else 0
