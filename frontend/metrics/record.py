"""`RequestRecord`: what is known of a request when it is over."""

from dataclasses import dataclass

from octavo.protocol.stats import RequestTimings


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request, as an observer is told of it."""

    num_prompt_tokens: int
    num_generation_tokens: int
    """Over all sequences of the request."""
    max_generation_tokens: int
    """Of the longest of them."""
    num_cached_tokens: int
    """Prompt tokens that came out of the prefix cache."""
    num_preemptions: int
    finish_reason: str
    """"stop", "length", "repetition", "abort" or "error"."""
    params_n: int
    params_max_tokens: int
    e2e_s: float
    """From the caller's request to its last token, on the frontend's clock."""
    timings: RequestTimings
    """On the core's clock; a time that never came is 0.0."""
