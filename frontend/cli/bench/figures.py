"""From what became of requests to figures: throughput, latencies, percentiles. Measures and prints nothing.

TTFT is the time from sending a request to its first text, ITL the time between two pieces of text, TPOT a request's
time after its first text divided by its further tokens, E2EL the time to the end of the answer. Names in the result
are those of `vllm bench serve --save-result`.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass
class Outcome:
    """What became of one request; times on the monotonic clock, in seconds."""

    sent: float
    finished: float = 0.0
    text_times: list[float] = field(default_factory=list)
    """When each piece of text arrived."""
    text: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""
    """Why it failed; "": it did not."""

    def latencies(self) -> dict[str, list[float]]:
        """Return the values that a good request adds to each metric, in milliseconds."""
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
    """Return a percentile, interpolated between the nearest values; 0 when there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summarize(
    outcomes: Sequence[Outcome],
    duration_s: float,
    metrics: Sequence[str],
    percents: Sequence[float],
    goodput_ms: Mapping[str, float],
) -> dict[str, Any]:
    """Return the figures of a run.

    Args:
        outcomes: of all its requests.
        duration_s: from the first request sent to the last answer's end.
        metrics: which latencies to tell, of `METRICS`.
        percents: which percentiles of them.
        goodput_ms: bounds; a request that keeps all of them counts for the goodput. Empty: no goodput.
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
        "max_concurrent_requests": _most_at_once(outcomes),
    }
    if goodput_ms:
        figures["request_goodput"] = sum(_keeps(outcome, goodput_ms) for outcome in good) / duration_s
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


def _keeps(outcome: Outcome, bounds_ms: Mapping[str, float]) -> bool:
    latencies = outcome.latencies()
    return bool(latencies) and all(
        statistics.fmean(latencies[metric] or [0.0]) <= bound for metric, bound in bounds_ms.items()
    )


def _most_at_once(outcomes: Sequence[Outcome]) -> int:
    """Return how many requests were in flight at most."""
    edges = [(outcome.sent, 1) for outcome in outcomes] + [(outcome.finished, -1) for outcome in outcomes]
    # At equal times, the one that ended goes first.
    running = most = 0
    for _, step in sorted(edges):
        running += step
        most = max(most, running)
    return most
