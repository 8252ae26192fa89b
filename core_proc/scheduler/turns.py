"""Divides running requests among the steps in flight of a pipeline. Counts requests and tokens; reads no clock.

A request decodes again when its last token is known, so the steps in flight decode different requests. If one step
decoded all of them, every stage would wait while the others compute. The same happens behind a step that is much larger
than the others, so prompts are spread over several steps.
"""

import math
from collections.abc import Sequence

from octavo.core_proc.scheduler.delta import StepRecord

STEPS_PER_STAGE = 4
"""Number of steps per stage over which the current prompts are spread, as in gLLM (Guo et al. 2025). Some stages idle
during the first and the last of these steps. With fewer and larger steps they would idle longer."""

MIN_PROMPT_TOKENS = 128
"""Least number of prompt tokens in a step, if that many are left. Smaller steps cost more time per token."""


class PipelineTurns:
    """Assigns the requests of one scheduler to the steps in flight.

    Args:
        num_stages: pipeline stages of the model. This many steps are computed at once.
        full_step_tokens: number of tokens from which on a larger step is no faster per token; 0 if unknown.
    """

    def __init__(self, num_stages: int, full_step_tokens: int) -> None:
        self._num_stages = num_stages
        self._min_prompt_tokens = full_step_tokens or MIN_PROMPT_TOKENS
        self._most_in_flight = full_step_tokens * num_stages or math.inf

    @property
    def is_pipelined(self) -> bool:
        """Whether there are several stages. If so, a request waits until its last token is known."""
        return self._num_stages > 1

    def max_decodes(self, num_decoding: int, num_in_flight: int) -> int:
        """Return how many requests the next step may decode.

        Args:
            num_decoding: requests that decode, including those in steps in flight.
            num_in_flight: steps in flight. A step planned ahead would make the others smaller, but not faster.
        """
        if self.is_pipelined and num_in_flight >= self._num_stages:
            return 0
        return -(-num_decoding // self._num_stages)

    def max_prompt_tokens(self, num_tokens_left: int, num_uncomputed: int) -> int:
        """Return how many prompt tokens the next step may compute.

        Args:
            num_tokens_left: tokens left in the step.
            num_uncomputed: uncomputed tokens of all prompts, waiting or running.
        """
        share = -(-num_uncomputed // (STEPS_PER_STAGE * self._num_stages))
        return min(num_tokens_left, max(share, self._min_prompt_tokens))

    def may_plan(self, in_flight: Sequence[StepRecord], depth: int, *, can_decode: bool) -> bool:
        """Return whether another step may be planned now.

        Every stage should have a step. Planning ahead saves the workers the short gap between two steps, but a request
        that arrives meanwhile waits one step longer. So nothing is planned ahead while full steps are in flight.

        Args:
            in_flight: the steps that are not committed.
            depth: most steps in flight.
            can_decode: whether a request may be extended now. With several stages it waits for a step of its own, which
                would never be planned while prompts fill each step that is planned ahead.
        """
        if len(in_flight) < self._num_stages or len(in_flight) >= depth:
            return len(in_flight) < min(self._num_stages, depth)
        if self.is_pipelined and can_decode:
            return False
        # If the plan in flight has several steps, the next one waits only for the present step.
        return sum(record.num_step_tokens for record in in_flight) < self._most_in_flight
