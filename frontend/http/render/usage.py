"""Counts the tokens and the time of a request from its outputs."""

from msgspec import UNSET, UnsetType

from octavo.frontend.http.render.timings import request_metrics
from octavo.frontend.http.schemas.timings import RequestMetrics
from octavo.frontend.http.schemas.usage import CompletionTokensDetails, PromptTokensDetails, Usage
from octavo.frontend.outputs import RequestOutput
from octavo.protocol.stats import RequestTimings


class UsageCount:
    """Tokens of all prompts and choices of one HTTP request, counted from deltas or from a complete output.

    Args:
        by_choice: whether to count each choice too, for `so_far`.
    """

    def __init__(self, *, by_choice: bool = False) -> None:
        self._latest: dict[int, RequestOutput] = {}
        """The latest output of each prompt."""
        self._by_choice: dict[tuple[int, int], int] | None = {} if by_choice else None
        """Number of generated tokens by prompt and choice."""
        self._num_generated = 0
        self._num_reasoning: int | None = None
        self._timings: list[RequestTimings] = []

    def add(self, output: RequestOutput, prompt_index: int = 0) -> None:
        """Count an output."""
        self._latest[prompt_index] = output
        for choice in output.outputs:  # perf: runs for every token of a stream
            self._num_generated += len(choice.token_ids)
            if self._by_choice is not None:
                key = prompt_index, choice.index
                self._by_choice[key] = self._by_choice.get(key, 0) + len(choice.token_ids)
        if output.finished:
            self._num_generated += output.num_discarded_tokens
            self._timings += output.timings

    def add_reasoning(self, num_tokens: int | None) -> None:
        """Count a finished choice's reasoning tokens; `None` if reasoning is not separated."""
        if num_tokens is not None:
            self._num_reasoning = (self._num_reasoning or 0) + num_tokens

    def metrics(self) -> RequestMetrics | UnsetType:
        """Return the timings of a request with one sequence, else UNSET: several sequences have no common timings."""
        return request_metrics(self._timings[0], self._num_generated) if len(self._timings) == 1 else UNSET

    def at_start(self, prompt_index: int = 0) -> Usage:
        """Return the usage of one choice before its first token."""
        return self._of_choice(prompt_index, 0)

    def so_far(self, choice_index: int, prompt_index: int = 0) -> Usage:
        """Return the usage of one choice so far; needs `by_choice`."""
        assert self._by_choice is not None
        return self._of_choice(prompt_index, self._by_choice.get((prompt_index, choice_index), 0))

    def _of_choice(self, prompt_index: int, num_generated: int) -> Usage:
        output = self._latest[prompt_index]
        num_prompt_tokens = len(output.prompt_token_ids)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            total_tokens=num_prompt_tokens + num_generated,
            completion_tokens=num_generated,
            prompt_tokens_details=PromptTokensDetails(output.num_cached_tokens),
        )

    def total(self) -> Usage:
        """Return the usage so far."""
        num_prompt_tokens = sum(len(output.prompt_token_ids) for output in self._latest.values())
        num_cached_tokens = sum(output.num_cached_tokens for output in self._latest.values())
        return Usage(
            prompt_tokens=num_prompt_tokens,
            total_tokens=num_prompt_tokens + self._num_generated,
            completion_tokens=self._num_generated,
            prompt_tokens_details=PromptTokensDetails(num_cached_tokens),
            completion_tokens_details=(
                UNSET if self._num_reasoning is None else CompletionTokensDetails(self._num_reasoning)
            ),
        )
