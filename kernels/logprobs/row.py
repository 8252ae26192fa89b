"""The result of `logprobs`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities at one position, as float32 values."""

    token_logprob: float
    rank: int
    """Place of the token in the vocabulary, ordered by likelihood, from 1."""
    top_token_ids: list[int]
    """The most likely tokens, or the requested ones."""
    top_logprobs: list[float]

    def followed_by(self, other: "RowLogprobs") -> "RowLogprobs":
        """Return this row with the top tokens of another row at the same position appended."""
        top_token_ids, top_logprobs = self.top_token_ids + other.top_token_ids, self.top_logprobs + other.top_logprobs
        return RowLogprobs(self.token_logprob, self.rank, top_token_ids, top_logprobs)
