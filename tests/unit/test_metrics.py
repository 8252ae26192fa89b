"""The exporter and the throughput line, over made-up statistics."""

import dataclasses

import msgspec
import pytest
from fake_client import resolved_config
from metrics_fakes import RECORD, exporter
from prometheus_client.parser import text_string_to_metric_families

from octavo.frontend.metrics.exporter import Metrics
from octavo.frontend.metrics.log_line import ThroughputLine
from octavo.frontend.metrics.names import METRICS, Kind, token_count_buckets
from octavo.frontend.metrics.observer import Observer
from octavo.protocol.stats import EngineStats, RequestTimings

LABELS = {"model_name": "org/fake", "engine": "0"}


def samples(metrics: Metrics) -> dict[str, float]:
    """Return every sample's value by name; those with further labels have them in the name."""
    result = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            assert sample.labels.items() >= LABELS.items(), sample
            further = [f"{key}={value}" for key, value in sample.labels.items() if key not in LABELS]
            result[",".join([sample.name, *further])] = sample.value
    return result


def test_is_an_observer() -> None:
    metrics = exporter()
    observer: Observer = metrics
    observer.on_first_token(0.1)
    assert samples(metrics)["octavo:time_to_first_token_seconds_count"] == 1


def test_every_name_of_the_table_is_exported() -> None:
    values = samples(exporter())
    suffix = {Kind.COUNTER: "_total", Kind.HISTOGRAM: "_count", Kind.GAUGE: ""}
    for metric in METRICS:
        if metric.name == "lora_requests_info":
            continue  # only of engines with adapters
        name = f"octavo:{metric.name}{suffix[metric.kind]}"
        assert any(key.partition(",")[0] == name for key in values), name


def test_vllm_names_are_copies() -> None:
    metrics = exporter(has_vllm_names=True)
    metrics.on_finished(RECORD)
    values = samples(metrics)
    ours = {key.removeprefix("octavo:"): value for key, value in values.items() if key.startswith("octavo:")}
    theirs = {key.removeprefix("vllm:"): value for key, value in values.items() if key.startswith("vllm:")}
    assert ours == theirs
    assert len(values) == 2 * len(ours)
    assert not any(key.startswith("vllm:") for key in samples(exporter()))


def test_engine_totals_become_counters() -> None:
    metrics = exporter()
    stats = EngineStats(num_running=2, num_waiting=1, num_blocks=10, num_free_blocks=4, prompt_tokens=100, num_steps=2)
    stats.prefix_cache_queries, stats.prefix_cache_hits = 100, 32
    metrics.on_engine_stats(stats)
    stats = msgspec.structs.replace(stats, prompt_tokens=150, generation_tokens=3, num_running=0)
    metrics.on_engine_stats(stats)
    metrics.on_engine_stats(msgspec.structs.replace(stats, generation_tokens=4, num_steps=3))
    values = samples(metrics)
    assert values["octavo:num_requests_running"] == 0
    assert values["octavo:num_requests_waiting"] == 1
    assert values["octavo:kv_cache_usage_perc"] == pytest.approx(0.6)
    assert values["octavo:prompt_tokens_total"] == 150
    assert values["octavo:generation_tokens_total"] == 4
    assert values["octavo:prefix_cache_hits_total"] == 32
    assert values["octavo:iteration_tokens_total_count"] == 3
    assert values["octavo:iteration_tokens_total_sum"] == 154  # all tokens, as in vLLM


def test_lost_workers_are_counted_by_cause() -> None:
    metrics = exporter()
    metrics.on_engine_stats(EngineStats(worker_failures={"hung": 1}, requests_resumed=3, last_worker_pause_s=2.5))
    causes = {"hung": 1, "exited": 2}
    metrics.on_engine_stats(EngineStats(worker_failures=causes, requests_resumed=5, last_worker_pause_s=1.5))
    values = {name.partition(",")[0] + name.partition("cause=")[2]: value for name, value in samples(metrics).items()}
    failures = {name: value for name, value in values.items() if name.startswith("octavo:worker_failures_total")}
    assert sorted(failures.values()) == [0, 0, 0, 1, 2]
    assert values["octavo:worker_requests_resumed_total"] == 5
    assert values["octavo:worker_last_pause_seconds"] == 1.5


def test_prompt_tokens_are_told_apart_by_their_source() -> None:
    metrics = exporter()
    metrics.on_engine_stats(EngineStats(prompt_tokens=100, prefix_cache_hits=30, num_steps=1))
    metrics.on_engine_stats(EngineStats(prompt_tokens=150, prefix_cache_hits=64, num_steps=2))
    values = samples(metrics)
    assert values["octavo:prompt_tokens_by_source_total,source=local_cache_hit"] == 64
    assert values["octavo:prompt_tokens_by_source_total,source=local_compute"] == 86


def test_waiting_requests_are_told_apart_by_their_reason() -> None:
    metrics = exporter()
    metrics.on_engine_stats(EngineStats(num_waiting=5, num_deferred=2, corrupted_requests=3))
    values = samples(metrics)
    assert values["octavo:num_requests_waiting"] == 5
    assert values["octavo:num_requests_waiting_by_reason,reason=capacity"] == 3
    assert values["octavo:num_requests_waiting_by_reason,reason=deferred"] == 2
    assert values["octavo:corrupted_requests_total"] == 3


def test_rejections_are_counted_by_the_limit_that_was_reached() -> None:
    metrics = exporter()
    metrics.on_rejected("max_num_queued_tokens")
    values = samples(metrics)
    assert values["octavo:admission_rejections_total,reason=max_num_queued_tokens"] == 1
    assert values["octavo:admission_rejections_total,reason=max_num_queued_reqs"] == 0


def test_each_engine_has_its_own_series() -> None:
    metrics = exporter(num_engines=3, has_vllm_names=True)
    metrics.on_engine_stats(EngineStats(prompt_tokens=100, num_steps=1, num_running=4), 0)
    metrics.on_engine_stats(EngineStats(prompt_tokens=30, num_steps=1), 2)
    metrics.on_finished(RECORD, 2)
    metrics.on_first_token(0.3, 1)
    metrics.on_first_token(0.3, 2)
    metrics.on_restart("core_died", 3, 2.5, 1)
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}

    def by_engine(name: str) -> dict[str, float]:
        family = name.removesuffix("_total").removesuffix("_count")
        return {one.labels["engine"]: one.value for one in families[family].samples if one.name == name and one.value}

    for prefix in ("octavo:", "vllm:"):
        assert by_engine(prefix + "prompt_tokens_total") == {"0": 100, "2": 30}
        assert by_engine(prefix + "num_requests_running") == {"0": 4}
        assert by_engine(prefix + "e2e_request_latency_seconds_count") == {"2": 1}
        assert by_engine(prefix + "time_to_first_token_seconds_count") == {"1": 1, "2": 1}
        assert by_engine(prefix + "engine_restarts_total") == {"1": 1}
        assert by_engine(prefix + "cache_config_info") == {"0": 1, "1": 1, "2": 1}
    assert sum(metrics.histogram("time_to_first_token_seconds")[1]) == 2, "of all engines"


def test_an_engine_that_left_is_not_exported() -> None:
    blocks = {0: 64, 1: 64}
    metrics = Metrics(resolved_config(), max_model_len=256, engine_blocks=lambda: blocks)
    metrics.on_engine_stats(EngineStats(num_running=1), 1)
    assert b'num_requests_running{engine="1",model_name="org/fake"} 1.0' in metrics.render()
    del blocks[1]
    assert b'engine="1"' not in metrics.render()


def test_counters_never_fall_when_the_engine_is_new() -> None:
    metrics = exporter()
    metrics.on_engine_stats(EngineStats(prompt_tokens=100, num_steps=50))
    metrics.on_engine_stats(EngineStats(prompt_tokens=10, num_steps=5))
    assert samples(metrics)["octavo:prompt_tokens_total"] == 110


def test_finished_request_fills_the_histograms() -> None:
    metrics = exporter()
    metrics.on_finished(RECORD)
    values = samples(metrics)
    expected = {
        "e2e_request_latency_seconds": 3.5,
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 1.0,
        "request_decode_time_seconds": 2.0,
        "request_inference_time_seconds": 3.0,
        "request_time_per_output_token_seconds": 0.2,
        "request_prompt_tokens": 20,
        "request_generation_tokens": 11,
        "request_max_num_generation_tokens": 11,
        "request_prefill_kv_computed_tokens": 4,
        "request_params_n": 1,
        "request_params_max_tokens": 64,
        "request_num_preemptions": 1,
    }
    for name, value in expected.items():
        assert values[f"octavo:{name}_sum"] == pytest.approx(value), name
        assert values[f"octavo:{name}_count"] == 1, name
    assert values["octavo:request_success_total,finished_reason=stop"] == 1
    assert values["octavo:request_success_total,finished_reason=abort"] == 0
    assert values["octavo:prompt_tokens_cached_total"] == 16


def test_request_that_never_ran_has_no_times() -> None:
    metrics = exporter()
    metrics.on_finished(dataclasses.replace(RECORD, finish_reason="abort", timings=RequestTimings(queued=10.0)))
    values = samples(metrics)
    assert values["octavo:request_queue_time_seconds_count"] == 0
    assert values["octavo:request_success_total,finished_reason=abort"] == 1


def test_latencies() -> None:
    metrics = exporter()
    metrics.on_first_token(0.25)
    metrics.on_inter_token(0.3, 3)
    values = samples(metrics)
    assert values["octavo:time_to_first_token_seconds_sum"] == 0.25
    assert values["octavo:inter_token_latency_seconds_count"] == 3
    assert values["octavo:inter_token_latency_seconds_sum"] == pytest.approx(0.3)


def test_cache_configuration_is_a_label() -> None:
    (key,) = [key for key in samples(exporter()) if key.startswith("octavo:cache_config_info")]
    assert "block_size=16" in key and "num_gpu_blocks=64" in key


def test_token_count_buckets_stop_at_the_model() -> None:
    assert token_count_buckets(256) == (1, 2, 5, 10, 20, 50, 100, 200)
    assert token_count_buckets(1) == (1,)


def test_throughput_line_says_rates_and_fills() -> None:
    line = ThroughputLine(now_s=100.0)
    stats = EngineStats(num_running=2, num_waiting=1, num_blocks=10, num_free_blocks=5, num_steps=4)
    stats.prompt_tokens, stats.generation_tokens = 1000, 50
    stats.prefix_cache_queries, stats.prefix_cache_hits = 200, 50
    assert line.next({0: stats}, 110.0) == (
        "Avg prompt throughput: 100.0 tokens/s, Avg generation throughput: 5.0 tokens/s, Running: 2 reqs, "
        "Waiting: 1 reqs, KV cache usage: 50.0%, Prefix cache hit rate: 25.0%"
    )


def test_throughput_line_is_silent_when_idle_and_knows_only_the_last_interval() -> None:
    line = ThroughputLine(now_s=0.0)
    stats = EngineStats(generation_tokens=100, num_steps=100)
    assert "generation throughput: 10.0" in (line.next({0: stats}, 10.0) or "")
    assert line.next({0: stats}, 20.0) is None
    later = EngineStats(generation_tokens=120, num_steps=120, num_preemptions=2)
    assert "generation throughput: 2.0 tokens/s" in (text := line.next({0: later}, 30.0) or "")
    assert "Preemptions: 2" in text


def test_throughput_line_survives_a_new_engine() -> None:
    line = ThroughputLine(now_s=0.0)
    line.next({0: EngineStats(generation_tokens=100, num_steps=100)}, 10.0)
    again = {0: EngineStats(generation_tokens=10, num_steps=10)}
    assert "generation throughput: 1.0" in (line.next(again, 20.0) or "")


def test_throughput_line_survives_that_one_of_several_engines_restarts_or_leaves() -> None:
    line = ThroughputLine(now_s=0.0)
    totals = {index: EngineStats(generation_tokens=1000, num_steps=1000) for index in range(3)}
    line.next(totals, 10.0)
    totals = {0: EngineStats(generation_tokens=1010, num_steps=1010), 1: EngineStats(generation_tokens=10, num_steps=9)}
    assert "generation throughput: 2.0 tokens/s" in (line.next(totals, 20.0) or "")


def test_line_shows_while_a_long_step_runs() -> None:
    line = ThroughputLine(now_s=0.0)
    assert "Running: 1 reqs" in (line.next({0: EngineStats(num_running=1)}, 10.0) or "")


def test_restarts_are_counted_by_cause() -> None:
    metrics = exporter()
    metrics.on_restart("core_died", 3, 2.5)
    metrics.on_restart("core_hung", 4, 1.5)
    values = samples(metrics)
    assert values["octavo:engine_restarts_total,cause=core_died"] == 1
    assert values["octavo:engine_restarts_total,cause=core_hung"] == 1
    assert values["octavo:requests_resumed_total"] == 7
    assert values["octavo:engine_restart_pause_seconds"] == 1.5


def test_counters_of_the_next_core_are_added_to_those_of_the_last() -> None:
    """Also where it has done more by its first report than the one before did in its life."""
    metrics = exporter()
    metrics.on_engine_stats(EngineStats(num_steps=5, generation_tokens=5))
    metrics.on_restart("core_died", 1, 2.5)
    metrics.on_engine_stats(EngineStats(num_steps=100, generation_tokens=90))
    assert samples(metrics)["octavo:generation_tokens_total"] == 95


def test_adapters_of_running_and_waiting_requests_are_labels() -> None:
    assert not [key for key in samples(exporter()) if "lora" in key]
    metrics = exporter(config=resolved_config(enable_lora=True, max_loras=3))
    metrics.on_engine_stats(EngineStats(running_adapters=["a", "b"], waiting_adapters=["c"]))
    (key,) = [key for key in samples(metrics) if key.startswith("octavo:lora_requests_info")]
    assert key.endswith(",max_lora=3,running_lora_adapters=a,b,waiting_lora_adapters=c")
