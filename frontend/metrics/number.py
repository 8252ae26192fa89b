"""`SharedSeries`: a Prometheus counter or gauge whose series are columns of `SharedCounters`."""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from octavo.frontend.metrics.names import Kind
from octavo.frontend.metrics.shared_counters import CounterColumns


class SharedSeries(Collector):
    """One metric.

    Args:
        kind: counter or gauge.
        name: with prefix.
        help_text: for `/metrics`.
        series: label names and values of each series.
        columns: one per series.
        created_s: when counting began, in seconds since the epoch.
    """

    def __init__(
        self,
        kind: Kind,
        name: str,
        help_text: str,
        series: Sequence[Mapping[str, str]],
        columns: CounterColumns,
        created_s: float,
    ) -> None:
        self._kind = kind
        self._name = name
        self._help_text = help_text
        self._series = series
        self._columns = columns
        self._created_s = created_s

    def add(self, amount: float, index: int = 0) -> None:
        """Increase this process's part of a series."""
        self._columns.own[index] += amount

    def set(self, value: float, index: int = 0) -> None:
        """Set this process's part of a series."""
        self._columns.own[index] = value

    def total(self, index: int = 0) -> float:
        """Return a series' value over all processes."""
        return self._columns.sums()[index]

    def collect(self) -> Iterator[Metric]:
        """Yield the series as they are now."""
        labels = list(self._series[0])
        if self._kind is Kind.COUNTER:
            counter = CounterMetricFamily(self._name, self._help_text, labels=labels)
            for values, total in zip(self._series, self._columns.sums(), strict=True):
                counter.add_metric(list(values.values()), total, created=self._created_s)
            yield counter
        else:
            gauge = GaugeMetricFamily(self._name, self._help_text, labels=labels)
            for values, total in zip(self._series, self._columns.sums(), strict=True):
                gauge.add_metric(list(values.values()), total)
            yield gauge
