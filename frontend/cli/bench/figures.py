"""Metrics of a run: throughput, latencies, percentiles and goodput, computed from the outcomes of its requests.

TTFT is the time from sending a request to its first text. ITL is the time between two pieces of text, TPOT the mean
time per token after the first, and E2EL the time to the end of the response. The names in the result are those of `vllm
bench serve --save-result`.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass
class Outcome:
    """How one request went; times in seconds on the monotonic clock."""

    sent: float
    finished: float = 0.0
    text_times: list[float] = field(default_factory=list)
    """Time at which each piece of text arrived."""
    text: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""
    """Why the request failed; "" if it did not."""

    def latencies(self) -> dict[str, list[float]]:
        """Return a successful request's values of each metric, in milliseconds."""
        if self.error or not self.text_times:
            return {}
        first, last = self.text_times[0], self.text_times[-1]
        gaps = [1e3 * (after - before) for before, after in zip(self.text_times, self.text_times[1:], strict=False)]
        return {
            "ttft": [1e3 * (first - self.sent)],
            "tpot": [1e3 * (last - first) / (self.num_output_tokens - 1)] if self.num_output_tokens > 1 else [],
            "itl": gaps,
            "e2el": [1e3 * (self.finished - self.sent)],
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile with linear interpolation; 0 if there are no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def summarize(
    outcomes: Sequence[Outcome],
    duration_s: float,
    metrics: Sequence[str],
    percents: Sequence[float],
    targets_ms: Mapping[str, float],
) -> dict[str, Any]:
    """Return the metrics of a run.

    Args:
        outcomes: the outcomes of all requests.
        duration_s: seconds from sending the first request to the end of the last response.
        metrics: latencies to report, from `METRICS`.
        percents: percentiles to report.
        targets_ms: goodput counts requests that meet all targets. Empty: goodput is not reported.
    """
    good = [outcome for outcome in outcomes if not outcome.error]
    num_input = sum(outcome.num_prompt_tokens for outcome in good)
    num_output = sum(outcome.num_output_tokens for outcome in good)
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": num_input,
        "total_cached_tokens": sum(outcome.num_cached_tokens for outcome in good),
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration_s,
        "request_goodput": None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_concurrent_requests": _peak_concurrency(outcomes),
    }
    if targets_ms:
        figures["request_goodput"] = sum(_meets_targets(outcome, targets_ms) for outcome in good) / duration_s
    for metric in metrics:
        values = [value for outcome in good for value in outcome.latencies().get(metric, [])]
        figures |= _distribution(metric, values, percents)
    return figures


def _distribution(metric: str, values: Sequence[float], percents: Sequence[float]) -> dict[str, float]:
    return {
        f"mean_{metric}_ms": statistics.fmean(values) if values else 0.0,
        f"median_{metric}_ms": percentile(values, 50),
        f"std_{metric}_ms": statistics.pstdev(values) if values else 0.0,
        **{f"p{percent:g}_{metric}_ms": percentile(values, percent) for percent in percents},
    }


def _meets_targets(outcome: Outcome, targets_ms: Mapping[str, float]) -> bool:
    """Return whether a request meets all targets. The ITL target applies to its largest gap instead of the mean."""
    latencies = outcome.latencies()
    return bool(latencies) and all(
        max(latencies[metric], default=0.0) <= target for metric, target in targets_ms.items()
    )


def _peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """Return the peak number of in-flight requests."""
    edges = [(outcome.sent, 1) for outcome in outcomes] + [(outcome.finished, -1) for outcome in outcomes]
    # At equal times, ends sort before starts.
    running = most = 0
    for _, step in sorted(edges):
        running += step
        most = max(most, running)
    return most
