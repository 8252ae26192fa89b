"""`RequestMetrics`: timings of a request, for servers with `--enable-per-request-metrics`."""

from msgspec import Struct


class RequestMetrics(Struct, kw_only=True):
    """Timings of one sequence in the engine. A field is null if the sequence ended too early to measure it."""

    time_to_first_token_ms: float | None = None
    """From the sequence's first step to its first token."""
    generation_time_ms: float | None = None
    """From the first token to the end."""
    queue_time_ms: float | None = None
    """From the arrival to the first step."""
    mean_itl_ms: float | None = None
    """Mean generation time per token after the first."""
    tokens_per_second: float | None = None
    """Number of tokens divided by the time from the first step to the end."""
