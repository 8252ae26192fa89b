"""What `logprobs` returns."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities at one position, as float32 values."""

    token_logprob: float
    rank: int
    """Place of the token in the order of the vocabulary, from 1."""
    top_token_ids: list[int]
    """The most likely ones, or the requested ones."""
    top_logprobs: list[float]
