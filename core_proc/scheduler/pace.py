"""When a step is planned, and whether its decodes wait for prompts. Decides by tokens, never by a clock.

What a step holds beside that is `scheduler.py`'s affair.
"""

from collections.abc import Sequence

from octavo.core_proc.scheduler.delta import StepRecord


def may_plan(in_flight: Sequence[StepRecord], depth: int, full_step_tokens: int) -> bool:
    """Return whether a further step may be planned now.

    Planning ahead spares the workers the wait between two steps, which is short; a request that arrives meanwhile waits
    for one step more. So nothing is planned ahead of a full step.

    Args:
        in_flight: the steps that are not committed.
        depth: most steps in flight.
        full_step_tokens: so many tokens make a step full; 0: none is.
    """
    if not in_flight or len(in_flight) >= depth:
        return not in_flight
    return not full_step_tokens or sum(record.num_tokens for record in in_flight) < full_step_tokens


class DecodePace:
    """Holds decodes back for prompts that come to their first token, but not for long.

    Args:
        interval_tokens: prompt tokens after which decodes have their turn all the same; 0: they are in every step.
    """

    def __init__(self, interval_tokens: int) -> None:
        self._interval_tokens = interval_tokens
        self._num_tokens = 0
        """Of prompts, since the last step with decodes."""

    @property
    def gives_way(self) -> bool:
        """True while decodes may wait."""
        return self._num_tokens < self._interval_tokens

    def count(self, num_prompt_tokens: int, *, leaves_decodes: bool) -> None:
        """Take note of a step, and whether it has left decodes waiting."""
        self._num_tokens = self._num_tokens + num_prompt_tokens if leaves_decodes else 0
