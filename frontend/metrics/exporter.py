"""`Metrics`: an `Observer` that maintains the metrics of `names.py` for each engine and renders them for Prometheus."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from octavo.frontend.metrics.engine_metrics import LABEL_VALUES, EngineMetrics
from octavo.frontend.metrics.names import METRICS, Kind, MetricName, cache_labels
from octavo.frontend.metrics.number import number_family
from octavo.frontend.metrics.observer import RestartCause
from octavo.frontend.metrics.record import RequestRecord
from octavo.frontend.metrics.shared_counters import SharedCounters
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.stats import EngineStats

PREFIX = "octavo:"
VLLM_PREFIX = "vllm:"


class Metrics(Collector):
    """An `Observer` that maintains Prometheus metrics in a registry of its own.

    Args:
        config: configuration of the engines; source of label values.
        max_model_len: maximum sequence length of the engines; upper bound of token-count buckets.
        engine_blocks: returns the number of KV blocks of each exported engine, by index.
        has_vllm_names: export every metric under vLLM's prefix, too.
        counters: storage. If it is shared, every process exports the totals of all processes. Engine-wide metrics are
            counted only by the process of the first row.
        buckets: upper edges of histograms by name; they override the table's.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        *,
        max_model_len: int,
        engine_blocks: Callable[[], Mapping[int, int]],
        has_vllm_names: bool = False,
        counters: SharedCounters | None = None,
        buckets: Mapping[str, tuple[float, ...]] = MappingProxyType({}),
    ) -> None:
        self._config = config
        self._buckets = buckets
        self._max_model_len = max_model_len
        self._engine_blocks = engine_blocks
        self._counters = counters or SharedCounters.private()
        self._created_s = self._creation_time()
        self._live = self._counters.allocate(1)
        self._live.own[0] = 0  # a gauge: discard the value of an earlier process of this row
        self._engines: dict[int, EngineMetrics] = {}
        self.has_vllm_names = has_vllm_names

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return render_together([self])

    def on_engine_stats(self, stats: EngineStats, engine: int = 0) -> None:
        """Add the increase of an engine's totals."""
        self._engine_metrics(engine).on_stats(stats)

    def on_restart(self, cause: RestartCause, num_requests: int, pause_s: float, engine: int = 0) -> None:
        """Count a restart; the new core counts from 0."""
        self._engine_metrics(engine).on_restart(cause, num_requests, pause_s)

    def on_live_requests(self, count: int) -> None:
        """Set the number of this process's unfinished requests."""
        self._live.own[0] = count

    @property
    def num_live_requests(self) -> int:
        """Number of unfinished requests of all processes."""
        return int(self._live.sums()[0])

    def on_first_token(self, latency_s: float, engine: int = 0) -> None:
        """Observe a time to first token."""
        self._engine_metrics(engine).observe("time_to_first_token_seconds", latency_s)

    def on_inter_token(self, latency_s: float, num_tokens: int, engine: int = 0) -> None:
        """Observe the time between two outputs, divided evenly among its `num_tokens` tokens."""
        self._engine_metrics(engine).observe("inter_token_latency_seconds", latency_s / num_tokens, num_tokens)

    def on_rejected(self, limit: str, engine: int = 0) -> None:
        """Count a request that was rejected because of a queue limit."""
        self._engine_metrics(engine).add("admission_rejections", 1, limit)

    def on_media_query(self, *, is_hit: bool) -> None:
        """Count a cache lookup of an image. The cache belongs to this process, so it counts for the first engine."""
        metrics = self._engine_metrics(0)
        metrics.add("mm_cache_queries", 1)
        metrics.add("mm_cache_hits", int(is_hit))

    def on_finished(self, record: RequestRecord, engine: int = 0) -> None:
        """Observe a finished request."""
        self._engine_metrics(engine).on_finished(record)

    def histogram(self, name: str) -> tuple[list[float], list[int]]:
        """Return a histogram's upper edges, and its counts over all engines including the overflow bucket.

        Args:
            name: metric name without prefix.

        Raises:
            KeyError: no histogram has this name.
        """
        histograms = [self._engine_metrics(engine).histograms[name] for engine in self._engine_blocks()]
        counts = [sum(column) for column in zip(*(one.counts for one in histograms), strict=True)]
        return histograms[0].edges, counts

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics as they are now."""
        blocks = dict(sorted(self._engine_blocks().items()))
        for metric in METRICS:
            name = PREFIX + metric.name
            if metric.kind is Kind.HISTOGRAM:
                family = HistogramMetricFamily(name, metric.help)
                for engine in blocks:
                    self._engine_metrics(engine).histograms[metric.name].add_to(
                        family, self._labels(engine), self._created_s
                    )
                yield family
            elif metric.name == "cache_config_info":
                info = [(self._labels(engine) | cache_labels(self._config, num), 1.0) for engine, num in blocks.items()]
                yield number_family(metric.kind, name, metric.help, info, self._created_s)
            elif metric.name == "lora_requests_info":
                info = [one for engine in blocks for one in self._adapters(engine)]
                yield number_family(metric.kind, name, metric.help, info, self._created_s)
            else:
                series = [one for engine in blocks for one in self._series(metric, engine)]
                yield number_family(metric.kind, name, metric.help, series, self._created_s)

    def _engine_metrics(self, engine: int) -> EngineMetrics:
        """Return the metrics of an engine, creating them if necessary."""
        if (found := self._engines.get(engine)) is None:
            found = self._engines[engine] = EngineMetrics(
                self._counters.section(engine), self._max_model_len, self._buckets
            )
        return found

    def _labels(self, engine: int) -> dict[str, str]:
        return {"model_name": self._config.served_model_names[0], "engine": str(engine)}

    def _adapters(self, engine: int) -> Iterator[tuple[dict[str, str], float]]:
        latest = self._engine_metrics(engine).adapters
        if self._config.lora is not None and latest is not None:
            names, time_s = latest
            yield self._labels(engine) | {"max_lora": str(self._config.lora.max_loras), **names}, time_s

    def _series(self, metric: MetricName, engine: int) -> Iterator[tuple[dict[str, str], float]]:
        labels, sums = self._labels(engine), self._engine_metrics(engine).numbers[metric.name].sums()
        if metric.name not in LABEL_VALUES:
            yield labels, sums[0]
            return
        (label,) = metric.labels
        for value, total in zip(LABEL_VALUES[metric.name], sums, strict=True):
            yield {**labels, label: value}, total

    def _creation_time(self) -> float:
        """Return when counting began, in seconds since the epoch; the process of the first row wrote it."""
        column = self._counters.allocate(1)
        if self._counters.row == 0:
            column.own[0] = time.time()
        return column.sums()[0]


def render_together(several: Sequence[Metrics]) -> bytes:
    """Return the metrics of several models in Prometheus' text format; they differ in the label `model_name`."""
    own = CollectorRegistry(auto_describe=False)
    own.register(_MergedMetrics(several))
    registries = [own]
    if several[0].has_vllm_names:
        renamed = CollectorRegistry(auto_describe=False)
        renamed.register(RenamedMetrics(own, PREFIX, VLLM_PREFIX))
        registries.append(renamed)
    return b"".join(generate_latest(registry) for registry in registries)


class _MergedMetrics(Collector):
    """Each metric once, with the series of all models: the text format allows one block per name."""

    def __init__(self, several: Sequence[Metrics]) -> None:
        self._several = several

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics as they are now."""
        for first, *further in zip(*(one.collect() for one in self._several), strict=True):
            for family in further:
                first.samples.extend(family.samples)
            yield first


class RenamedMetrics(Collector):
    """All metrics of a registry under another prefix, copied at each scrape."""

    def __init__(self, source: CollectorRegistry, prefix: str, new_prefix: str) -> None:
        self._source = source
        self._prefix = prefix
        self._new_prefix = new_prefix

    def collect(self) -> Iterator[Metric]:
        """Yield renamed copies."""
        for family in self._source.collect():
            copy = Metric(self._rename(family.name), family.documentation, family.type)
            copy.samples = [sample._replace(name=self._rename(sample.name)) for sample in family.samples]
            yield copy

    def _rename(self, name: str) -> str:
        return self._new_prefix + name.removeprefix(self._prefix)
