"""`get_metrics`: the metrics of an engine as objects, under vLLM's names."""

from dataclasses import dataclass

from prometheus_client import Metric as Family
from prometheus_client.core import HistogramMetricFamily

from octavo.frontend.metrics.exporter import PREFIX, VLLM_PREFIX, Metrics

_ACCEPTED_PER_POSITION = VLLM_PREFIX + "spec_decode_num_accepted_tokens_per_pos"


@dataclass
class Metric:
    """One metric of one engine."""

    name: str
    """`vllm:...`, without `_total`."""
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A value that only increases."""

    value: int


@dataclass
class Vector(Metric):
    """Counters by position: accepted draft tokens of speculative decoding."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A value that increases and decreases."""

    value: float


@dataclass
class Histogram(Metric):
    """A histogram of observed values."""

    count: int
    sum: float
    buckets: dict[str, int]
    """Number of observations up to each upper edge (cumulative); the last edge is `+Inf`."""


def snapshot(metrics: Metrics) -> list[Metric]:
    """Return the current metrics."""
    found: list[Metric] = []
    for family in metrics.collect():
        name = VLLM_PREFIX + family.name.removeprefix(PREFIX)
        if isinstance(family, HistogramMetricFamily):
            found += _histograms(name, family)
        elif family.type == "counter":
            found += _counters(name, family)
        else:
            found += [Gauge(name, one.labels, one.value) for one in family.samples]
    return found


def _counters(name: str, family: Family) -> list[Metric]:
    samples = [one for one in family.samples if one.name.endswith("_total")]
    if name != _ACCEPTED_PER_POSITION:
        return [Counter(name, one.labels, int(one.value)) for one in samples]
    vectors: dict[tuple[tuple[str, str], ...], dict[int, int]] = {}
    for one in samples:
        labels = {key: value for key, value in one.labels.items() if key != "position"}
        vectors.setdefault(tuple(labels.items()), {})[int(one.labels["position"])] = int(one.value)
    return [
        Vector(name, dict(labels), [by_position[position] for position in sorted(by_position)])
        for labels, by_position in vectors.items()
    ]


def _histograms(name: str, family: Family) -> list[Metric]:
    found: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for one in family.samples:
        labels = {key: value for key, value in one.labels.items() if key != "le"}
        histogram = found.setdefault(tuple(labels.items()), Histogram(name, labels, 0, 0.0, {}))
        if one.name.endswith("_bucket"):
            histogram.buckets[one.labels["le"]] = int(one.value)
        elif one.name.endswith("_count"):
            histogram.count = int(one.value)
        elif one.name.endswith("_sum"):
            histogram.sum = one.value
    return list(found.values())
