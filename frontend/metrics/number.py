"""A Prometheus counter or gauge of all engines, from columns of `SharedCounters`."""

from collections.abc import Iterable, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from octavo.frontend.metrics.names import Kind


def number_family(
    kind: Kind, name: str, help_text: str, series: Iterable[tuple[Mapping[str, str], float]], created_s: float
) -> Metric:
    """Return a metric with its series.

    Args:
        kind: counter or gauge.
        name: including the prefix.
        help_text: for `/metrics`.
        series: labels and value of each series.
        created_s: when counting began, in seconds since the epoch.
    """
    if kind is Kind.GAUGE:
        gauge = GaugeMetricFamily(name, help_text)
        for labels, value in series:
            gauge.add_sample(name, dict(labels), value)
        return gauge
    counter = CounterMetricFamily(name, help_text)
    for labels, value in series:
        counter.add_sample(f"{name}_total", dict(labels), value)
        counter.add_sample(f"{name}_created", dict(labels), created_s)
    return counter
