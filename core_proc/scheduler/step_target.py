"""How many tokens a step may hold so that it takes about as long as it should.

Knows no clock: the time of each step comes with its result, so a recording holds it and replays to the same plans.
"""

import math
from collections.abc import Iterable, Sequence

from octavo.core_proc.scheduler.prompt_cost import PromptCost
from octavo.protocol.steps import Scheduled

MIN_PROMPT_TOKENS = 32
"""Tokens left for prompts in every step, however slow the machine and however many requests decode."""

MIN_MEASURED_TOKENS = MIN_PROMPT_TOKENS
"""Steps with fewer prompt tokens say little about the cost of a token: most of their time goes into reading the
weights. Not above the smallest step with a long prompt, or a cost that led to such steps would never be measured
again."""


class StepTarget:
    """Limits the tokens of a step by the measured cost of a token.

    Args:
        target_s: how long a step should take, in seconds; 0: no target.
        max_tokens: most tokens of a step at any cost; also the budget until the cost is known.
    """

    def __init__(self, target_s: float, max_tokens: int) -> None:
        self._target_s = target_s
        self._max_tokens = max_tokens
        self.cost = PromptCost()

    def observe(self, scheduled: Sequence[Scheduled], num_prompt_tokens: int, elapsed_s: float) -> bool:
        """Learn from a step that has been executed in `elapsed_s` seconds; returns True if the step was used."""
        if num_prompt_tokens < MIN_MEASURED_TOKENS or elapsed_s <= 0.0:
            return False
        self.cost.observe(scheduled, elapsed_s)
        return True

    @property
    def is_active(self) -> bool:
        """True if steps have a target."""
        return self._target_s > 0.0

    def max_step_tokens(self, num_decodes: int, prompt_starts: Iterable[int] = ()) -> int:
        """Return the token budget of the next step.

        Args:
            num_decodes: tokens of it that are for decodes.
            prompt_starts: the first position to compute of each running prompt. All tokens are assumed to be of the
                furthest, the most expensive ones.
        """
        if not self.is_active or not self.cost.is_measured:
            return self._max_tokens
        first_s, key_s = self.cost.token_s + self.cost.key_s * max(prompt_starts, default=0), self.cost.key_s
        # The n of n * (first_s + key_s * n / 2) = target_s.
        num_in_time = int(2 * self._target_s / (first_s + math.sqrt(first_s * first_s + 2 * key_s * self._target_s)))
        return min(self._max_tokens, max(num_in_time, num_decodes + MIN_PROMPT_TOKENS))
