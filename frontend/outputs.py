"""What generation returns, with vLLM's field names and meanings."""

from dataclasses import dataclass, field
from typing import TypeAlias

from octavo.protocol.stats import RequestTimings


@dataclass(slots=True)
class Logprob:
    """One candidate token at one position."""

    logprob: float
    rank: int | None = None
    """From 1, in the model's unmodified distribution; None when it was not computed."""
    decoded_token: str | None = None


PositionLogprobs: TypeAlias = dict[int, Logprob]
"""Token id to logprob: the token itself first, then the alternatives by falling logprob."""


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence, or what is new of it."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum over the whole sequence so far; None unless logprobs or `best_of` were asked for."""
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    """"stop", "length", "abort" or "error"; None while it runs."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for EOS."""

    @property
    def finished(self) -> bool:
        """True when this sequence has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that came out of the prefix cache."""
    num_preemptions: int = 0
    num_discarded_tokens: int = 0
    """Of sequences that were generated for `best_of` and are not among the outputs, when `finished`."""
    timings: list[RequestTimings] = field(default_factory=list)
    """One per sequence that was generated, when `finished`."""
