"""How many tokens a step may hold so that it takes about as long as it should.

Knows no clock: the time of each step comes with its result, so a recording holds it and replays to the same plans.
"""

import math
from collections.abc import Iterable, Sequence

from octavo.protocol.steps import Scheduled

MIN_PROMPT_TOKENS = 32
"""Tokens left for prompts in every step, however slow the machine and however many requests decode."""

MIN_MEASURED_TOKENS = MIN_PROMPT_TOKENS
"""Steps with fewer prompt tokens say little about the cost of a token: most of their time goes into reading the
weights. Not above the smallest step with a long prompt, or a cost that led to such steps would never be measured
again."""

LEARNING_RATE = 0.3
"""The part of a prediction error that the next prediction no longer has."""

MAX_ERROR = 0.5
"""Relative to the prediction. A step that was slow by accident must not shrink the next ones much."""

EQUAL_SHARE_KEYS = 1024
"""At this context an error changes the predictions of both terms equally; below, mostly the term without keys."""


class StepTarget:
    """Limits the tokens of a step by the measured cost of a token.

    A token costs a constant for the linear layers, plus attention to the keys before it: `token_s + key_s * num_keys`
    seconds. At the end of a long prompt of a small model the second term is the larger one. Both are learned from every
    step with enough prompt tokens (normalized least mean squares).

    Args:
        target_s: how long a step should take, in seconds; 0: no target.
        max_tokens: most tokens of a step at any cost; also the budget until the cost is known.
    """

    def __init__(self, target_s: float, max_tokens: int) -> None:
        self._target_s = target_s
        self._max_tokens = max_tokens
        self._token_s = 0.0
        """0: no step has been measured."""
        self._key_s = 0.0
        self._is_warm = False
        """True after the first large step, whose time is not used: it includes what is loaded on first use."""

    def observe(self, scheduled: Sequence[Scheduled], num_prompt_tokens: int, elapsed_s: float) -> None:
        """Learn from a step that has been executed in `elapsed_s` seconds."""
        if num_prompt_tokens < MIN_MEASURED_TOKENS or elapsed_s <= 0.0 or not self.is_active:
            return
        if not self._is_warm:
            self._is_warm = True
            return
        num_tokens = sum(chunk.num_tokens for chunk in scheduled)
        num_keys = sum(chunk.num_tokens * (chunk.start + chunk.num_tokens / 2) for chunk in scheduled) / num_tokens
        measured_s = elapsed_s / num_tokens
        if not self.is_measured:
            self._token_s = measured_s
            return
        predicted_s = self._token_s + self._key_s * num_keys
        error_s = min(measured_s - predicted_s, MAX_ERROR * predicted_s)
        scale = num_keys / EQUAL_SHARE_KEYS
        change_s = LEARNING_RATE * error_s / (1.0 + scale * scale)
        self._token_s = max(self._token_s + change_s, 0.1 * self._token_s)
        self._key_s = max(self._key_s + change_s * scale / EQUAL_SHARE_KEYS, 0.0)

    @property
    def is_active(self) -> bool:
        """True if steps have a target."""
        return self._target_s > 0.0

    @property
    def is_measured(self) -> bool:
        """True once the cost of a token is known."""
        return self._token_s > 0.0

    def max_step_tokens(self, num_decodes: int, prompt_starts: Iterable[int] = ()) -> int:
        """Return the token budget of the next step.

        Args:
            num_decodes: tokens of it that are for decodes.
            prompt_starts: the first position to compute of each running prompt. All tokens are assumed to be of the
                furthest, the most expensive ones.
        """
        if not self.is_active or not self.is_measured:
            return self._max_tokens
        first_s = self._token_s + self._key_s * max(prompt_starts, default=0)
        # The n of n * (first_s + key_s * n / 2) = target_s.
        num_in_time = int(
            2 * self._target_s / (first_s + math.sqrt(first_s * first_s + 2 * self._key_s * self._target_s))
        )
        return min(self._max_tokens, max(num_in_time, num_decodes + MIN_PROMPT_TOKENS))
