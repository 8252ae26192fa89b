"""Limits the tokens of a step so that it takes about its target time.

Reads no clock: the duration of each step comes with its result. A recording contains these durations, so it replays to
the same plans.
"""

import math
from collections.abc import Iterable, Sequence

from octavo.core_proc.scheduler.prompt_cost import PromptCost
from octavo.protocol.steps import Scheduled

MIN_PROMPT_TOKENS = 32
"""Number of tokens reserved for prompts in every step, on any machine and with any number of decodes."""

MIN_MEASURED_TOKENS = MIN_PROMPT_TOKENS
"""Steps with fewer prompt tokens are not measured: reading the weights dominates their duration. Must not exceed the
smallest step with a long prompt. Otherwise a cost estimate that leads to such steps would never be corrected."""


class StepTarget:
    """Limits the tokens of a step by the measured cost of a token.

    Args:
        target_s: target duration of a step in seconds; 0: no target.
        max_tokens: most tokens of a step at any cost; also the budget until the cost is known.
    """

    def __init__(self, target_s: float, max_tokens: int) -> None:
        self._target_s = target_s
        self._max_tokens = max_tokens
        self.cost = PromptCost()

    def observe(self, scheduled: Sequence[Scheduled], num_prompt_tokens: int, elapsed_s: float) -> bool:
        """Learn from a step that took `elapsed_s` seconds. Return whether the step was used."""
        if num_prompt_tokens < MIN_MEASURED_TOKENS or elapsed_s <= 0.0:
            return False
        self.cost.observe(scheduled, elapsed_s)
        return True

    @property
    def is_active(self) -> bool:
        """Whether steps have a target duration."""
        return self._target_s > 0.0

    def max_step_tokens(self, num_decodes: int, prompt_starts: Iterable[int] = ()) -> int:
        """Return the token budget of the next step.

        Args:
            num_decodes: number of decode tokens in the step.
            prompt_starts: first uncomputed position of each running prompt. The estimate assumes that all tokens are at
                the largest of these, where they cost most.
        """
        if not self.is_active or not self.cost.is_measured:
            return self._max_tokens
        first_s, key_s = self.cost.token_s + self.cost.key_s * max(prompt_starts, default=0), self.cost.key_s
        # Solves n * (first_s + key_s * n / 2) = target_s for n.
        num_in_time = int(2 * self._target_s / (first_s + math.sqrt(first_s * first_s + 2 * key_s * self._target_s)))
        return min(self._max_tokens, max(num_in_time, num_decodes + MIN_PROMPT_TOKENS))
