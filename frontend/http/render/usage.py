"""Counting what a request took, as its outputs come in."""

from octavo.frontend.http.schemas.usage import PromptTokensDetails, Usage
from octavo.frontend.outputs import RequestOutput


class UsageCount:
    """Tokens over all prompts and choices of one HTTP request, from deltas or from a whole output."""

    def __init__(self) -> None:
        self._num_prompt_tokens: dict[int, int] = {}
        self._num_cached_tokens: dict[int, int] = {}
        self._num_generated = 0

    def add(self, output: RequestOutput, prompt_index: int = 0) -> None:
        """Count an output."""
        self._num_prompt_tokens[prompt_index] = len(output.prompt_token_ids)
        self._num_cached_tokens[prompt_index] = output.num_cached_tokens
        self._num_generated += sum(len(choice.token_ids) for choice in output.outputs)
        self._num_generated += output.num_discarded_tokens

    def total(self) -> Usage:
        """Return the usage so far."""
        num_prompt_tokens = sum(self._num_prompt_tokens.values())
        return Usage(
            prompt_tokens=num_prompt_tokens,
            total_tokens=num_prompt_tokens + self._num_generated,
            completion_tokens=self._num_generated,
            prompt_tokens_details=PromptTokensDetails(sum(self._num_cached_tokens.values())),
        )
