"""How the running requests share the steps in flight of a pipeline. Counts requests and tokens; has no clock.

A request decodes again when its last token is known, so the steps in flight decode different requests. If one step took
all of them, every stage would wait while the others compute.
"""

import math
from collections.abc import Sequence

from octavo.core_proc.scheduler.delta import StepRecord


class PipelineTurns:
    """The turns of one scheduler's requests.

    Args:
        num_stages: of the model; as many steps are computed at once.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages

    @property
    def are_taken(self) -> bool:
        """True if there are several stages: then a request whose last token is not known must wait."""
        return self._num_stages > 1

    def max_decodes(self, num_decoding: int) -> int:
        """Return how many requests the next step may decode, of those that decode, in flight or not."""
        return -(-num_decoding // self._num_stages)

    def may_plan(self, in_flight: Sequence[StepRecord], depth: int, full_step_tokens: int) -> bool:
        """Return whether another step may be planned now.

        Every stage has a step. Planning ahead saves the workers the short gap between two steps, but a request that
        arrives meanwhile waits one step longer. So nothing is planned ahead while full steps are in flight.

        Args:
            in_flight: the steps that are not committed.
            depth: most steps in flight.
            full_step_tokens: a step of this many tokens is full; 0: no step is.
        """
        if len(in_flight) < self._num_stages or len(in_flight) >= depth:
            return len(in_flight) < min(self._num_stages, depth)
        limit = full_step_tokens * self._num_stages or math.inf
        return sum(record.num_tokens for record in in_flight) < limit
