"""`EngineMetrics`: the metrics of one engine, in columns of `SharedCounters`."""

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import get_args

from octavo.frontend.metrics.histogram import SharedHistogram, num_columns
from octavo.frontend.metrics.names import METRICS, UP_TO_MODEL_LEN, Kind, MetricName, token_count_buckets
from octavo.frontend.metrics.observer import RestartCause
from octavo.frontend.metrics.record import RequestRecord
from octavo.frontend.metrics.shared_counters import CounterColumns, SharedCounters
from octavo.protocol.events import FinishReason
from octavo.protocol.stats import EngineStats

_COUNTERS = (
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "num_recomputed_tokens"),
    *("prompt_tokens", "generation_tokens", "corrupted_requests"),
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    *("external_prefix_cache_queries", "external_prefix_cache_hits"),
    *("encoder_cache_queries", "encoder_cache_hits", "encoder_tokens"),
)
"""Counters that correspond to a field of the same name in `EngineStats`."""

_FAILURE_CAUSES = ("exited", "raised", "hung", "not_started", "other_engine")
"""Keys of `EngineStats.worker_failures`."""

_POSITIONS = tuple(map(str, range(16)))
"""Positions of draft tokens within a step that have a series of their own."""

LABEL_VALUES: dict[str, tuple[str, ...]] = {
    "request_success": tuple(map(str, FinishReason)),
    "engine_restarts": get_args(RestartCause),
    "worker_failures": _FAILURE_CAUSES,
    "num_requests_waiting_by_reason": ("capacity", "deferred"),
    "spec_decode_num_accepted_tokens_per_pos": _POSITIONS,
    "prompt_tokens_by_source": ("local_compute", "local_cache_hit", "external_kv_transfer"),
    "kv_transfer_total_bytes": ("saved", "loaded"),
    "admission_rejections": ("max_num_queued_reqs", "max_num_queued_tokens"),
}
"""Values of the single label of a metric. All series exist from the start: `rate()` needs a first sample of 0."""


class EngineMetrics:
    """Numbers and histograms of one engine.

    Args:
        counters: storage.
        max_model_len: upper bound of token-count buckets.
        buckets: upper edges of histograms by name; they override the table's.
    """

    def __init__(
        self,
        counters: SharedCounters,
        max_model_len: int,
        buckets: Mapping[str, tuple[float, ...]] = MappingProxyType({}),
    ) -> None:
        self._counts_engine = counters.row == 0
        self._last = EngineStats()
        self._unobserved_tokens = 0
        """Tokens of reports without a new step; they are counted with the next report that has a step."""
        self.adapters: tuple[dict[str, str], float] | None = None
        """Labels with the names of LoRA adapters, and the time of their report. `None` if there was none."""
        self.numbers: dict[str, CounterColumns] = {}
        """By metric name: one column, or one column for each of the metric's `LABEL_VALUES`."""
        self.histograms: dict[str, SharedHistogram] = {}
        for metric in METRICS:
            if metric.kind is Kind.HISTOGRAM:
                edges = buckets.get(metric.name) or _edges(metric, max_model_len)
                self.histograms[metric.name] = SharedHistogram(edges, counters.allocate(num_columns(edges)))
            else:
                self.numbers[metric.name] = counters.allocate(len(LABEL_VALUES.get(metric.name, "1")))

    def add(self, name: str, amount: float, value: str | None = None) -> None:
        """Increase this process's part of a counter; `value` selects the series if it has several."""
        index = 0 if value is None else LABEL_VALUES[name].index(value)
        self.numbers[name].own[index] += max(0, amount)

    def observe(self, name: str, value: float, count: int = 1) -> None:
        """Count a value in a histogram, `count` times."""
        self.histograms[name].observe(value, count)

    def on_stats(self, stats: EngineStats) -> None:
        """Add the increase of the engine's totals. A total that has decreased means that a new core counts from 0."""
        names = stats.running_adapters, stats.waiting_adapters
        labels = zip(("running_lora_adapters", "waiting_lora_adapters"), map(",".join, names), strict=True)
        self.adapters = dict(labels), time.time()
        if not self._counts_engine:
            return
        last, self._last = self._last, stats
        if stats.num_steps < last.num_steps:
            last = EngineStats()
        self._set("num_requests_running", stats.num_running)
        self._set("num_requests_waiting", stats.num_waiting)
        self._set("num_requests_waiting_by_reason", stats.num_waiting - stats.num_deferred, "capacity")
        self._set("num_requests_waiting_by_reason", stats.num_deferred, "deferred")
        self._set("kv_cache_usage_perc", stats.kv_cache_usage)
        for name in _COUNTERS:
            self.add(name, getattr(stats, name) - getattr(last, name))
        num_hits = max(0, stats.prefix_cache_hits - last.prefix_cache_hits)
        self.add("prompt_tokens_by_source", num_hits, "local_cache_hit")
        num_loaded = max(0, stats.external_prefix_cache_hits - last.external_prefix_cache_hits)
        self.add("prompt_tokens_by_source", num_loaded, "external_kv_transfer")
        num_computed = stats.prompt_tokens - last.prompt_tokens - num_hits - num_loaded
        self.add("prompt_tokens_by_source", num_computed, "local_compute")
        self.add("kv_offload_store_bytes", stats.kv_offload_stored_bytes - last.kv_offload_stored_bytes)
        self.add("kv_offload_load_bytes", stats.kv_offload_loaded_bytes - last.kv_offload_loaded_bytes)
        num_saved = stats.kv_transfer_saved_bytes - last.kv_transfer_saved_bytes
        self.add("kv_transfer_total_bytes", num_saved, "saved")
        num_loaded = stats.kv_transfer_loaded_bytes - last.kv_transfer_loaded_bytes
        self.add("kv_transfer_total_bytes", num_loaded, "loaded")
        self._set("encoder_cache_usage_perc", stats.num_cached_encoder_tokens / max(1, stats.num_encoder_cache_tokens))
        self._set("kv_offload_usage_perc", stats.kv_offload_used_bytes / max(1, stats.kv_offload_capacity_bytes))
        for cause in _FAILURE_CAUSES:
            growth = stats.worker_failures.get(cause, 0) - last.worker_failures.get(cause, 0)
            self.add("worker_failures", growth, cause)
        for position in _POSITIONS:
            accepted = [one.spec_decode_accepted_per_pos.get(int(position), 0) for one in (stats, last)]
            self.add("spec_decode_num_accepted_tokens_per_pos", accepted[0] - accepted[1], position)
        self.add("worker_requests_resumed", stats.requests_resumed - last.requests_resumed)
        self._set("worker_last_pause_seconds", stats.last_worker_pause_s)
        # As in vLLM, a prompt counts completely, including its cached tokens; so does each generated token.
        for count in ("prompt_tokens", "generation_tokens"):
            self._unobserved_tokens += max(0, getattr(stats, count) - getattr(last, count))
        if num_steps := stats.num_steps - last.num_steps:
            self.observe("iteration_tokens_total", self._unobserved_tokens / num_steps, num_steps)
            self._unobserved_tokens = 0

    def on_restart(self, cause: RestartCause, num_requests: int, pause_s: float) -> None:
        """Count a restart; the new core counts from 0."""
        self._last = EngineStats()
        self.add("requests_resumed", num_requests)
        if self._counts_engine:
            self.add("engine_restarts", 1, cause)
            self._set("engine_restart_pause_seconds", pause_s)

    def on_finished(self, record: RequestRecord) -> None:
        """Observe a finished request."""
        self.add("request_success", 1, record.finish_reason)
        self.add("prompt_tokens_cached", record.num_cached_tokens)
        self.observe("e2e_request_latency_seconds", record.e2e_s)
        self.observe("request_prompt_tokens", record.num_prompt_tokens)
        self.observe("request_generation_tokens", record.num_generation_tokens)
        self.observe("request_max_num_generation_tokens", record.max_generation_tokens)
        self.observe("request_prefill_kv_computed_tokens", record.num_prompt_tokens - record.num_cached_tokens)
        self.observe("request_params_n", record.params_n)
        self.observe("request_params_max_tokens", record.params_max_tokens)
        self.observe("request_num_preemptions", record.num_preemptions)
        times = record.timings
        if not times.first_token:  # the request finished without a token, so it has no latencies
            return
        decode_s = times.finished - times.first_token
        self.observe("request_queue_time_seconds", times.scheduled - times.queued)
        self.observe("request_prefill_time_seconds", times.first_token - times.scheduled)
        self.observe("request_decode_time_seconds", decode_s)
        self.observe("request_inference_time_seconds", times.finished - times.scheduled)
        # The timings are those of one sequence, so divide the tokens of all n sequences.
        num_later_tokens = record.num_generation_tokens / record.params_n - 1
        if num_later_tokens > 0:
            self.observe("request_time_per_output_token_seconds", decode_s / num_later_tokens)

    def _set(self, name: str, amount: float, value: str | None = None) -> None:
        """Set this process's part of a gauge."""
        self.numbers[name].own[0 if value is None else LABEL_VALUES[name].index(value)] = amount


def _edges(metric: MetricName, max_model_len: int) -> tuple[float, ...]:
    assert metric.buckets is not None, "a histogram has buckets"
    return token_count_buckets(max_model_len) if metric.buckets == UP_TO_MODEL_LEN else metric.buckets
