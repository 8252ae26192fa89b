"""Decides when decodes wait for prompts. Counts tokens and reads no clock."""


class DecodeThrottle:
    """Delays decodes in favor of prompts that are about to complete, for a bounded number of tokens.

    Args:
        interval_tokens: number of prompt tokens after which decodes always run; 0: decodes run in every step.
    """

    def __init__(self, interval_tokens: int) -> None:
        self._interval_tokens = interval_tokens
        self._num_tokens = 0
        """Prompt tokens since the last step with decodes."""

    @property
    def can_defer(self) -> bool:
        """Whether decodes may wait."""
        return self._num_tokens < self._interval_tokens

    def count(self, num_prompt_tokens: int, *, leaves_decodes: bool) -> None:
        """Count a step. `leaves_decodes` says whether it left decodes waiting."""
        self._num_tokens = self._num_tokens + num_prompt_tokens if leaves_decodes else 0
