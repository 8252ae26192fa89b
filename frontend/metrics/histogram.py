"""`TallyHistogram`: a Prometheus histogram of one series in cells of a board, filled at the price of a bisection.

prometheus_client's own walks through the buckets under locks, which with a dozen histograms for each request
costs more than to tokenize it.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from octavo.frontend.metrics.board import Cells


def num_cells(edges: Sequence[float]) -> int:
    """Return how many cells a histogram with these edges needs."""
    return len(edges) + 2


class TallyHistogram(Collector):
    """Counts values between rising edges.

    Args:
        name: with prefix.
        help_text: for `/metrics`.
        labels: of the series, with their values.
        edges: upper edges of the buckets, each part of its bucket; the last bucket has none.
        cells: one for each bucket and a last one for the sum, `num_cells(edges)`.
        created_s: when counting began, in seconds since the epoch.
    """

    def __init__(
        self,
        name: str,
        help_text: str,
        labels: Mapping[str, str],
        edges: Sequence[float],
        cells: Cells,
        created_s: float,
    ) -> None:
        self._name = name
        self._help_text = help_text
        self._labels = dict(labels)
        self._edges = list(edges)
        self._cells = cells
        self._own = cells.own
        self._created_s = created_s

    @property
    def edges(self) -> list[float]:
        """Upper edges of all buckets but the last."""
        return list(self._edges)

    @property
    def counts(self) -> list[int]:
        """What each bucket holds; the last one's values lie beyond all edges."""
        return [int(count) for count in self._cells.sums()[:-1]]

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, `count` times."""
        self._own[bisect_left(self._edges, value)] += count
        self._own[-1] += value * count

    def collect(self) -> Iterator[Metric]:
        """Yield the series as it is now."""
        family = HistogramMetricFamily(self._name, self._help_text, labels=list(self._labels))
        edges = [floatToGoString(edge) for edge in [*self._edges, float("inf")]]  # type: ignore[no-untyped-call]
        *counts, total = self._cells.sums()
        buckets = list(zip(edges, accumulate(counts), strict=True))
        family.add_metric(list(self._labels.values()), buckets, total)
        family.add_sample(self._name + "_created", self._labels, self._created_s)
        yield family
