"""`RequestMetrics`: the times of a request, for servers with `--enable-per-request-metrics`."""

from msgspec import Struct


class RequestMetrics(Struct, kw_only=True):
    """Times of one sequence in the engine; null if it ended too early."""

    time_to_first_token_ms: float | None = None
    """From its first step to its first token."""
    generation_time_ms: float | None = None
    """From its first token to its end."""
    queue_time_ms: float | None = None
    """From its arrival to its first step."""
    mean_itl_ms: float | None = None
    """Generation time for each token after the first."""
    tokens_per_second: float | None = None
    """Tokens over the time from its first step to its end."""
