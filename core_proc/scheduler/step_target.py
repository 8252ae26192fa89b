"""How many tokens a step may hold so that it takes about as long as it should.

Knows no clock: the time of each step comes with its result, so a recording holds it and replays to the same plans.
"""

MIN_PROMPT_TOKENS = 32
"""Tokens left for prompts in every step, however slow the machine and however many requests decode."""

MIN_MEASURED_TOKENS = MIN_PROMPT_TOKENS
"""Smaller steps say little about the cost of a token: most of their time goes into reading the weights. Not above the
smallest step with a prompt, or a rate that led to such steps would never be measured again."""

WEIGHT_OF_LATEST = 0.3
"""Weight of the latest step in the moving average. A long prompt's tokens get slower by a few percent per step, since
each attends to more keys; a step that was slow by accident must not shrink the next ones much."""


class StepTarget:
    """Limits the tokens of a step by the measured time per token.

    Args:
        target_s: how long a step should take, in seconds; 0: no target.
        max_tokens: most tokens of a step at any rate; also the budget until the rate is known.
    """

    def __init__(self, target_s: float, max_tokens: int) -> None:
        self._target_s = target_s
        self._max_tokens = max_tokens
        self._seconds_per_token = 0.0
        """Moving average over the large steps; 0: none has been measured."""

    def observe(self, num_tokens: int, elapsed_s: float) -> None:
        """Count a step that has been executed in `elapsed_s` seconds."""
        if num_tokens < MIN_MEASURED_TOKENS or elapsed_s <= 0.0:
            return
        latest = elapsed_s / num_tokens
        change = latest - self._seconds_per_token
        self._seconds_per_token = self._seconds_per_token + WEIGHT_OF_LATEST * change if self.is_measured else latest

    @property
    def is_active(self) -> bool:
        """True if steps have a target."""
        return self._target_s > 0.0

    @property
    def is_measured(self) -> bool:
        """True once a step was large enough to tell the time per token."""
        return self._seconds_per_token > 0.0

    def max_step_tokens(self, num_decodes: int) -> int:
        """Return the token budget of the next step, of which `num_decodes` are for decodes."""
        if not self.is_active or not self.is_measured:
            return self._max_tokens
        num_in_time = int(self._target_s / self._seconds_per_token)
        return min(self._max_tokens, max(num_in_time, num_decodes + MIN_PROMPT_TOKENS))
