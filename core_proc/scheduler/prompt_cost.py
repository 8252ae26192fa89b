"""`PromptCost`: what a token of a prompt costs, learned from steps.

Knows no clock: the time of each step comes with its result.
"""

from collections.abc import Sequence

from octavo.protocol.steps import Scheduled

LEARNING_RATE = 0.3
"""The part of a prediction error that the next prediction no longer has."""

MAX_ERROR = 0.5
"""Relative to the prediction. A step that was slow by accident must not change the next predictions much."""

EQUAL_SHARE_KEYS = 1024
"""At this context an error changes the predictions of both terms equally; below, mostly the term without keys."""


class PromptCost:
    """The time of a token in a step with many of them: a constant for the linear layers, plus attention to the keys
    before it, `token_s + key_s * num_keys` seconds.

    At the end of a long prompt of a small model the second term is the larger one. Both are learned from every step
    (normalized least mean squares).
    """

    def __init__(self) -> None:
        self.token_s = 0.0
        """0: no step has been measured."""
        self.key_s = 0.0
        self._is_warm = False
        """True after the first step, whose time is not used: it includes what is loaded on first use."""

    @property
    def is_measured(self) -> bool:
        """True once the cost is known."""
        return self.token_s > 0.0

    def observe(self, scheduled: Sequence[Scheduled], elapsed_s: float) -> None:
        """Learn from a step of many tokens that has been executed in `elapsed_s` seconds."""
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
