"""When decodes wait for prompts. Counts tokens; has no clock."""


class DecodeThrottle:
    """Holds decodes back for prompts that are about to complete, for a bounded number of tokens.

    Args:
        interval_tokens: prompt tokens after which decodes run in any case; 0: they run in every step.
    """

    def __init__(self, interval_tokens: int) -> None:
        self._interval_tokens = interval_tokens
        self._num_tokens = 0
        """Prompt tokens since the last step with decodes."""

    @property
    def can_defer(self) -> bool:
        """True while decodes may wait."""
        return self._num_tokens < self._interval_tokens

    def count(self, num_prompt_tokens: int, *, leaves_decodes: bool) -> None:
        """Count a step, and whether it left decodes waiting."""
        self._num_tokens = self._num_tokens + num_prompt_tokens if leaves_decodes else 0
