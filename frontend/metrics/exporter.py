"""`Metrics`: an `Observer` that keeps the metrics of `names.py` and renders them for Prometheus."""

import time
from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from octavo.frontend.metrics.histogram import SharedHistogram, num_columns
from octavo.frontend.metrics.names import METRICS, UP_TO_MODEL_LEN, Kind, MetricName, cache_labels, token_count_buckets
from octavo.frontend.metrics.number import SharedSeries
from octavo.frontend.metrics.observer import RestartCause
from octavo.frontend.metrics.record import RequestRecord
from octavo.frontend.metrics.shared_counters import SharedCounters
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.events import FinishReason
from octavo.protocol.stats import EngineStats, total

PREFIX = "octavo:"
VLLM_PREFIX = "vllm:"
ENGINE = "0"

_COUNTERS = (
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "num_recomputed_tokens"),
    *("prompt_tokens", "generation_tokens", "corrupted_requests"),
)
"""Counters that are fields of `EngineStats` of the same name."""

_FAILURE_CAUSES = ("exited", "raised", "hung", "not_started")
"""Keys of `EngineStats.worker_failures`."""

_VALUES: dict[str, tuple[str, ...]] = {
    "request_success": tuple(map(str, FinishReason)),
    "engine_restarts": get_args(RestartCause),
    "worker_failures": _FAILURE_CAUSES,
    "num_requests_waiting_by_reason": ("capacity", "deferred"),
    "prompt_tokens_by_source": ("local_compute", "local_cache_hit"),
    "admission_rejections": ("max_num_queued_reqs", "max_num_queued_tokens"),
}
"""Values of a metric's one label. All series exist from the start: `rate()` needs a first sample of 0."""


class Metrics:
    """An `Observer` that keeps Prometheus metrics in a registry of its own.

    Args:
        config: of the engine; source of label values.
        num_blocks: KV blocks of the engine.
        max_model_len: of the engine; upper bound of token-count buckets.
        has_vllm_names: also export every metric under vLLM's prefix.
        counters: storage. If shared, every process exports the totals of all. Engine-wide metrics are counted by
            the process of the first row only.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        has_vllm_names: bool = False,
        counters: SharedCounters | None = None,
    ) -> None:
        own = CollectorRegistry(auto_describe=False)
        self._values = {"model_name": config.served_model_names[0], "engine": ENGINE}
        self._counters = counters or SharedCounters.private()
        self._counts_engine = self._counters.row == 0
        self._created_s = self._creation_time()
        self._live = self._counters.allocate(1)
        self._live.own[0] = 0  # a gauge: discard the value of an earlier process of this row
        self._numbers: dict[str, SharedSeries] = {}
        self._histograms: dict[str, SharedHistogram] = {}
        self._last: dict[int, EngineStats] = {}
        for metric in METRICS:
            self._add(metric, own, max_model_len, cache_labels(config, num_blocks))
        self._registries = [own]
        if has_vllm_names:
            renamed = CollectorRegistry(auto_describe=False)
            renamed.register(RenamedMetrics(own, PREFIX, VLLM_PREFIX))
            self._registries.append(renamed)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return b"".join(generate_latest(registry) for registry in self._registries)

    def on_engine_stats(self, stats: EngineStats, engine: int = 0) -> None:
        """Add the growth of an engine's totals. A smaller total means a new engine that counts from 0."""
        if not self._counts_engine:
            return
        last = self._last.get(engine, EngineStats())
        if stats.num_steps < last.num_steps:
            last = EngineStats()
        self._last[engine] = stats
        all_engines = total(list(self._last.values()))
        self._numbers["num_requests_running"].set(all_engines.num_running)
        self._numbers["num_requests_waiting"].set(all_engines.num_waiting)
        num_waiting = all_engines.num_waiting - all_engines.num_deferred
        self._set("num_requests_waiting_by_reason", "capacity", num_waiting)
        self._set("num_requests_waiting_by_reason", "deferred", all_engines.num_deferred)
        self._numbers["kv_cache_usage_perc"].set(all_engines.kv_cache_usage)
        for name in _COUNTERS:
            self._numbers[name].add(max(0, getattr(stats, name) - getattr(last, name)))
        num_hits = max(0, stats.prefix_cache_hits - last.prefix_cache_hits)
        self._add_to("prompt_tokens_by_source", "local_cache_hit", num_hits)
        self._add_to("prompt_tokens_by_source", "local_compute", stats.prompt_tokens - last.prompt_tokens - num_hits)
        for cause in _FAILURE_CAUSES:
            growth = stats.worker_failures.get(cause, 0) - last.worker_failures.get(cause, 0)
            self._add_to("worker_failures", cause, growth)
        self._numbers["worker_requests_resumed"].add(max(0, stats.requests_resumed - last.requests_resumed))
        self._numbers["worker_last_pause_seconds"].set(stats.last_worker_pause_s)
        num_steps = stats.num_steps - last.num_steps
        if num_steps:
            mean = (stats.step_tokens - last.step_tokens) / num_steps
            self._histograms["iteration_tokens_total"].observe(mean, num_steps)

    def on_restart(self, cause: RestartCause, num_requests: int, pause_s: float, engine: int = 0) -> None:
        """Count a restart; the new core counts from 0."""
        self._last[engine] = EngineStats()
        self._numbers["requests_resumed"].add(num_requests)
        if self._counts_engine:
            self._add_to("engine_restarts", cause, 1)
            self._numbers["engine_restart_pause_seconds"].set(pause_s)

    def on_live_requests(self, count: int) -> None:
        """Set the number of this process's unfinished requests."""
        self._live.own[0] = count

    @property
    def num_live_requests(self) -> int:
        """Unfinished requests of all processes."""
        return int(self._live.sums()[0])

    def on_first_token(self, latency_s: float) -> None:
        """Observe a time to first token."""
        self._histograms["time_to_first_token_seconds"].observe(latency_s)

    def on_inter_token(self, latency_s: float, num_tokens: int) -> None:
        """Observe the time between two outputs, divided evenly among its `num_tokens` tokens."""
        self._histograms["inter_token_latency_seconds"].observe(latency_s / num_tokens, num_tokens)

    def on_rejected(self, limit: str) -> None:
        """Count a request rejected because of this queue limit."""
        self._add_to("admission_rejections", limit, 1)

    def on_finished(self, record: RequestRecord) -> None:
        """Observe a finished request."""
        self._add_to("request_success", record.finish_reason, 1)
        self._numbers["prompt_tokens_cached"].add(record.num_cached_tokens)
        self._observe("e2e_request_latency_seconds", record.e2e_s)
        self._observe("request_prompt_tokens", record.num_prompt_tokens)
        self._observe("request_generation_tokens", record.num_generation_tokens)
        self._observe("request_max_num_generation_tokens", record.max_generation_tokens)
        self._observe("request_prefill_kv_computed_tokens", record.num_prompt_tokens - record.num_cached_tokens)
        self._observe("request_params_n", record.params_n)
        self._observe("request_params_max_tokens", record.params_max_tokens)
        self._observe("request_num_preemptions", record.num_preemptions)
        times = record.timings
        if not times.first_token:  # it finished without a token: no latencies
            return
        decode_s = times.finished - times.first_token
        self._observe("request_queue_time_seconds", times.scheduled - times.queued)
        self._observe("request_prefill_time_seconds", times.first_token - times.scheduled)
        self._observe("request_decode_time_seconds", decode_s)
        self._observe("request_inference_time_seconds", times.finished - times.scheduled)
        # The timings are of one sequence; divide the tokens of all n sequences.
        num_later_tokens = record.num_generation_tokens / record.params_n - 1
        if num_later_tokens > 0:
            self._observe("request_time_per_output_token_seconds", decode_s / num_later_tokens)

    def histogram(self, name: str) -> tuple[list[float], list[int]]:
        """Return a histogram's upper edges, and its counts including the overflow bucket.

        Args:
            name: metric name without prefix.

        Raises:
            KeyError: no histogram has this name.
        """
        return self._histograms[name].edges, self._histograms[name].counts

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def _add_to(self, name: str, value: str, amount: float) -> None:
        """Increase the counter series with this label value."""
        self._numbers[name].add(max(0, amount), _VALUES[name].index(value))

    def _set(self, name: str, value: str, amount: float) -> None:
        """Set the gauge series with this label value."""
        self._numbers[name].set(amount, _VALUES[name].index(value))

    def _creation_time(self) -> float:
        """Return when counting began, in seconds since the epoch, as the first row's process wrote it."""
        column = self._counters.allocate(1)
        if self._counts_engine:
            column.own[0] = time.time()
        return column.sums()[0]

    def _add(self, metric: MetricName, registry: CollectorRegistry, max_model_len: int, cache: dict[str, str]) -> None:
        name = PREFIX + metric.name
        if metric.kind is Kind.HISTOGRAM:
            edges = token_count_buckets(max_model_len) if metric.buckets == UP_TO_MODEL_LEN else metric.buckets
            assert edges is not None
            columns = self._counters.allocate(num_columns(edges))
            histogram = SharedHistogram(name, metric.help, self._values, edges, columns, self._created_s)
            self._histograms[metric.name] = histogram
            registry.register(histogram)
            return
        series = [{**self._values, **cache}] if metric.name == "cache_config_info" else [self._values]
        if metric.name in _VALUES:
            (label,) = metric.labels
            series = [{**self._values, label: value} for value in _VALUES[metric.name]]
        columns = self._counters.allocate(len(series))
        numbers = SharedSeries(metric.kind, name, metric.help, series, columns, self._created_s)
        self._numbers[metric.name] = numbers
        registry.register(numbers)
        if metric.name == "cache_config_info" and self._counts_engine:
            numbers.set(1)


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
