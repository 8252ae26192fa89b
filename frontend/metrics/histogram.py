"""`SharedHistogram`: a Prometheus histogram stored in `SharedCounters`; observing costs one bisection.

prometheus_client's histogram scans its buckets under a lock. With a dozen histograms per request, that costs more than
tokenizing the request.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from octavo.frontend.metrics.shared_counters import CounterColumns


def num_columns(edges: Sequence[float]) -> int:
    """Return the number of columns that a histogram with these edges needs."""
    return len(edges) + 2


class SharedHistogram:
    """Counts values between ascending edges.

    Args:
        edges: inclusive upper edges of the buckets; the overflow bucket follows the last.
        columns: `num_columns(edges)`, one per bucket and one for the sum.
    """

    def __init__(self, edges: Sequence[float], columns: CounterColumns) -> None:
        self.edges = list(edges)
        """Upper edges of all buckets except the overflow bucket."""
        self._columns = columns
        self._own = columns.own

    @property
    def counts(self) -> list[int]:
        """Number of values in each bucket, including the overflow bucket."""
        return [int(count) for count in self._columns.sums()[:-1]]

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, `count` times."""
        self._own[bisect_left(self.edges, value)] += count
        self._own[-1] += value * count

    def add_to(self, family: HistogramMetricFamily, labels: Mapping[str, str], created_s: float) -> None:
        """Add the current series to a metric.

        Args:
            family: the metric.
            labels: labels of the series.
            created_s: when counting began, in seconds since the epoch.
        """
        edges = [floatToGoString(edge) for edge in [*self.edges, float("inf")]]  # type: ignore[no-untyped-call]
        *counts, total = self._columns.sums()
        for edge, count in zip(edges, accumulate(counts), strict=True):
            family.add_sample(f"{family.name}_bucket", {**labels, "le": edge}, count)
        family.add_sample(f"{family.name}_count", dict(labels), sum(counts))
        family.add_sample(f"{family.name}_sum", dict(labels), total)
        family.add_sample(f"{family.name}_created", dict(labels), created_s)
