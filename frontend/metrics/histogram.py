"""`SharedHistogram`: a Prometheus histogram with one series, stored in `SharedCounters`; observing costs one bisection.

prometheus_client's histogram scans its buckets under a lock. With a dozen histograms per request that costs more than
tokenizing the request.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from octavo.frontend.metrics.shared_counters import CounterColumns


def num_columns(edges: Sequence[float]) -> int:
    """Return how many columns a histogram with these edges needs."""
    return len(edges) + 2


class SharedHistogram(Collector):
    """Counts values between ascending edges.

    Args:
        name: with prefix.
        help_text: for `/metrics`.
        labels: names and values.
        edges: inclusive upper edges of the buckets; the overflow bucket follows the last.
        columns: `num_columns(edges)`, one per bucket and one for the sum.
        created_s: when counting began, in seconds since the epoch.
    """

    def __init__(
        self,
        name: str,
        help_text: str,
        labels: Mapping[str, str],
        edges: Sequence[float],
        columns: CounterColumns,
        created_s: float,
    ) -> None:
        self._name = name
        self._help_text = help_text
        self._labels = dict(labels)
        self._edges = list(edges)
        self._columns = columns
        self._own = columns.own
        self._created_s = created_s

    @property
    def edges(self) -> list[float]:
        """Upper edges of all buckets except the overflow bucket."""
        return list(self._edges)

    @property
    def counts(self) -> list[int]:
        """Values in each bucket, including the overflow bucket."""
        return [int(count) for count in self._columns.sums()[:-1]]

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, `count` times."""
        self._own[bisect_left(self._edges, value)] += count
        self._own[-1] += value * count

    def collect(self) -> Iterator[Metric]:
        """Yield the series as it is now."""
        family = HistogramMetricFamily(self._name, self._help_text, labels=list(self._labels))
        edges = [floatToGoString(edge) for edge in [*self._edges, float("inf")]]  # type: ignore[no-untyped-call]
        *counts, total = self._columns.sums()
        buckets = list(zip(edges, accumulate(counts), strict=True))
        family.add_metric(list(self._labels.values()), buckets, total)
        family.add_sample(self._name + "_created", self._labels, self._created_s)
        yield family
