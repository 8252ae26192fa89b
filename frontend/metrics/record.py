"""`RequestRecord`: figures of a finished request."""

from dataclasses import dataclass

from octavo.protocol.stats import RequestTimings


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A finished request, as an observer sees it."""

    num_prompt_tokens: int
    num_generation_tokens: int
    """Number of generated tokens of all sequences of the request."""
    max_generation_tokens: int
    """Number of generated tokens of the longest sequence."""
    num_cached_tokens: int
    """Number of prompt tokens found in the prefix cache."""
    num_preemptions: int
    finish_reason: str
    """"stop", "length", "repetition", "abort" or "error"."""
    params_n: int
    params_max_tokens: int
    e2e_s: float
    """Seconds from the caller's request to its last token, on the frontend's clock."""
    timings: RequestTimings
    """Times on the core's clock; 0.0 for an event that never happened."""
    temperature: float | None = None
    """Sampling temperature. `None` if the request does not sample."""
    top_p: float | None = None
    request_id: str = ""
    """Id of the request, unique within the client."""

    @property
    def first_token_s(self) -> float:
        """Seconds from the caller's request to its first token, if it had one."""
        return self.e2e_s - (self.timings.finished - self.timings.first_token)
