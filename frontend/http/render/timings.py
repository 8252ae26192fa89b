"""Converts the core's timings of a request to the public format. Measures nothing."""

from octavo.frontend.http.schemas.timings import RequestMetrics
from octavo.protocol.stats import RequestTimings


def request_metrics(timings: RequestTimings, num_tokens: int) -> RequestMetrics:
    """Return the timings in the public format.

    Args:
        timings: timings of a sequence that has ended.
        num_tokens: number of tokens that the sequence generated.
    """
    metrics = RequestMetrics()
    if not timings.scheduled:
        return metrics
    metrics.queue_time_ms = 1e3 * (timings.scheduled - timings.queued)
    if not timings.first_token:
        return metrics
    metrics.time_to_first_token_ms = 1e3 * (timings.first_token - timings.scheduled)
    metrics.generation_time_ms = 1e3 * (timings.finished - timings.first_token)
    if num_tokens > 1:
        metrics.mean_itl_ms = metrics.generation_time_ms / (num_tokens - 1)
    if timings.finished > timings.scheduled:
        metrics.tokens_per_second = num_tokens / (timings.finished - timings.scheduled)
    return metrics
