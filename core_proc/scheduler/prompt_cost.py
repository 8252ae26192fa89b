"""`PromptCost`: the cost of a prompt token in seconds, learned from steps.

Reads no clock: the duration of each step comes with its result.
"""

from collections.abc import Sequence

from octavo.protocol.steps import Scheduled

LEARNING_RATE = 0.3
"""Fraction of a prediction error that is corrected at once."""

MAX_ERROR = 0.5
"""Largest error that is learned from, relative to the prediction. A step that was slow by accident must not change
later predictions much."""

EQUAL_SHARE_KEYS = 1024
"""Context length at which an error corrects both terms equally. At shorter contexts it mostly corrects `token_s`."""


class PromptCost:
    """The time per token of a step with many tokens: `token_s + key_s * num_keys` seconds. The constant term is for
    linear layers, the other one for attention to the preceding keys.

    At the end of a long prompt of a small model the second term is larger. Both are learned from every step with
    normalized least mean squares.
    """

    def __init__(self) -> None:
        self.token_s = 0.0
        """Seconds per token without attention; 0 if no step was measured."""
        self.key_s = 0.0
        self._is_warm = False
        """True after the first step. Its time is ignored because it includes loading on first use."""

    @property
    def is_measured(self) -> bool:
        """True once the cost is known."""
        return self.token_s > 0.0

    def observe(self, scheduled: Sequence[Scheduled], elapsed_s: float) -> None:
        """Learn from a step with many tokens that took `elapsed_s` seconds."""
        if not self._is_warm:
            self._is_warm = True
            return
        num_tokens = sum(chunk.num_tokens for chunk in scheduled)
        num_keys = sum(chunk.num_tokens * (chunk.start + chunk.num_tokens / 2) for chunk in scheduled) / num_tokens
        measured_s = elapsed_s / num_tokens
        if not self.is_measured:
            self.token_s = measured_s
            return
        predicted_s = self.token_s + self.key_s * num_keys
        error_s = min(measured_s - predicted_s, MAX_ERROR * predicted_s)
        scale = num_keys / EQUAL_SHARE_KEYS
        change_s = LEARNING_RATE * error_s / (1.0 + scale * scale)
        self.token_s = max(self.token_s + change_s, 0.1 * self.token_s)
        self.key_s = max(self.key_s + change_s * scale / EQUAL_SHARE_KEYS, 0.0)
