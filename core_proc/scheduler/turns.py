"""How the running requests share the steps in flight of a pipeline. Counts requests and tokens; has no clock.

A request decodes again when its last token is known, so the steps in flight decode different requests. If one step took
all of them, every stage would wait while the others compute. The same happens behind a step that is much larger than
the others, so prompts are spread over several steps.
"""

import math
from collections.abc import Sequence

from octavo.core_proc.scheduler.delta import StepRecord

STEPS_PER_STAGE = 4
"""The prompts of the moment are spread over this many steps for each stage, as in gLLM (Guo et al. 2025). While the
first and the last of these steps are computed, some stages wait; fewer and larger steps would make this time longer."""

MIN_PROMPT_TOKENS = 128
"""A step takes as many tokens of prompts if there are any. Smaller steps take longer for each token."""


class PipelineTurns:
    """The turns of one scheduler's requests.

    Args:
        num_stages: of the model; as many steps are computed at once.
        full_step_tokens: from this many tokens on a larger step is no faster per token; 0: not known.
    """

    def __init__(self, num_stages: int, full_step_tokens: int) -> None:
        self._num_stages = num_stages
        self._min_prompt_tokens = full_step_tokens or MIN_PROMPT_TOKENS
        self._most_in_flight = full_step_tokens * num_stages or math.inf

    @property
    def are_taken(self) -> bool:
        """True if there are several stages: then a request whose last token is not known must wait."""
        return self._num_stages > 1

    def max_decodes(self, num_decoding: int, num_in_flight: int) -> int:
        """Return how many requests the next step may decode.

        Args:
            num_decoding: requests that decode, in a step in flight or not.
            num_in_flight: steps. One that is planned ahead would make the others smaller, but not faster.
        """
        if self.are_taken and num_in_flight >= self._num_stages:
            return 0
        return -(-num_decoding // self._num_stages)

    def max_prompt_tokens(self, num_tokens_left: int, num_uncomputed: int) -> int:
        """Return how many tokens of prompts the next step may compute.

        Args:
            num_tokens_left: room in the step.
            num_uncomputed: of all prompts, waiting or begun.
        """
        share = -(-num_uncomputed // (STEPS_PER_STAGE * self._num_stages))
        return min(num_tokens_left, max(share, self._min_prompt_tokens))

    def may_plan(self, in_flight: Sequence[StepRecord], depth: int, *, can_decode: bool) -> bool:
        """Return whether another step may be planned now.

        Every stage has a step. Planning ahead saves the workers the short gap between two steps, but a request that
        arrives meanwhile waits one step longer. So nothing is planned ahead while full steps are in flight.

        Args:
            in_flight: the steps that are not committed.
            depth: most steps in flight.
            can_decode: whether a request may be extended now. With several stages it waits for a turn, which would
                never come while prompts fill each step that is planned ahead.
        """
        if len(in_flight) < self._num_stages or len(in_flight) >= depth:
            return len(in_flight) < min(self._num_stages, depth)
        if self.are_taken and can_decode:
            return False
        return sum(record.num_tokens for record in in_flight) < self._most_in_flight
