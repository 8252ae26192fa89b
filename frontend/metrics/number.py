"""`TallyNumbers`: a Prometheus counter or gauge whose series are cells of a board."""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from octavo.frontend.metrics.board import Cells
from octavo.frontend.metrics.names import Kind


class TallyNumbers(Collector):
    """One metric.

    Args:
        kind: counter or gauge.
        name: with prefix.
        help_text: for `/metrics`.
        series: the labels of each, with their values.
        cells: one for each series.
        created_s: when counting began, in seconds since the epoch.
    """

    def __init__(
        self,
        kind: Kind,
        name: str,
        help_text: str,
        series: Sequence[Mapping[str, str]],
        cells: Cells,
        created_s: float,
    ) -> None:
        self._kind = kind
        self._name = name
        self._help_text = help_text
        self._series = series
        self._cells = cells
        self._created_s = created_s

    def add(self, amount: float, index: int = 0) -> None:
        """Raise what this process contributes to a series."""
        self._cells.own[index] += amount

    def set(self, value: float, index: int = 0) -> None:
        """Replace what this process contributes to a series."""
        self._cells.own[index] = value

    def total(self, index: int = 0) -> float:
        """Return a series' value over all processes."""
        return self._cells.sums()[index]

    def collect(self) -> Iterator[Metric]:
        """Yield the series as they are now."""
        labels = list(self._series[0])
        if self._kind is Kind.COUNTER:
            counter = CounterMetricFamily(self._name, self._help_text, labels=labels)
            for values, total in zip(self._series, self._cells.sums(), strict=True):
                counter.add_metric(list(values.values()), total, created=self._created_s)
            yield counter
        else:
            gauge = GaugeMetricFamily(self._name, self._help_text, labels=labels)
            for values, total in zip(self._series, self._cells.sums(), strict=True):
                gauge.add_metric(list(values.values()), total)
            yield gauge
