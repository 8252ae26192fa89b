"""Metrics of several processes: each counts in its own row and exports the sum of all rows."""

import dataclasses
from pathlib import Path

import pytest
from metrics_fakes import RECORD, exporter

from octavo.frontend.metrics.exporter import Metrics
from octavo.frontend.metrics.shared_counters import NUM_COLUMNS, SharedCounters
from octavo.protocol.stats import EngineStats


def values(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in metrics.render().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_every_process_tells_the_sum_of_all(tmp_path: Path) -> None:
    first = exporter(counters=SharedCounters.create(tmp_path / "counters", 3))
    others = [exporter(counters=SharedCounters.attach(tmp_path / "counters", row)) for row in (1, 2)]
    for count, metrics in enumerate([first, *others], start=1):
        for _ in range(count):
            metrics.on_finished(RECORD)
        metrics.on_first_token(count / 10)
        metrics.on_live_requests(count)
    assert values(first) == values(others[0]) == values(others[1])
    told = values(first)
    labels = '{engine="0",model_name="org/fake"}'
    assert told['octavo:request_success_total{engine="0",finished_reason="stop",model_name="org/fake"}'] == 6
    assert told["octavo:e2e_request_latency_seconds_count" + labels] == 6
    assert told["octavo:e2e_request_latency_seconds_sum" + labels] == pytest.approx(6 * RECORD.e2e_s)
    assert told["octavo:time_to_first_token_seconds_sum" + labels] == pytest.approx(0.6)
    assert {metrics.num_live_requests for metrics in (first, *others)} == {6}


def test_metrics_of_the_engine_are_counted_once(tmp_path: Path) -> None:
    first = exporter(counters=SharedCounters.create(tmp_path / "counters", 2))
    second = exporter(counters=SharedCounters.attach(tmp_path / "counters", 1))
    stats = EngineStats(num_running=2, prompt_tokens=10, generation_tokens=5, num_steps=3)
    for metrics in (second, first):  # the core tells every process
        metrics.on_engine_stats(stats)
    told = values(second)
    labels = '{engine="0",model_name="org/fake"}'
    assert told["octavo:num_requests_running" + labels] == 2
    assert told["octavo:prompt_tokens_total" + labels] == 10
    assert told["octavo:iteration_tokens_total_count" + labels] == 3
    assert [value for name, value in told.items() if name.startswith("octavo:cache_config_info")] == [1]


def test_engines_are_told_apart_by_all_processes(tmp_path: Path) -> None:
    first = exporter(2, counters=SharedCounters.create(tmp_path / "counters", 2))
    second = exporter(2, counters=SharedCounters.attach(tmp_path / "counters", 1))
    for engine in (1, 0):  # not in the order in which the other process hears of them
        second.on_finished(RECORD, engine)
    first.on_finished(RECORD, 0)
    told = values(first)
    assert told == values(second)
    counts = [told[f'octavo:request_params_n_count{{engine="{one}",model_name="org/fake"}}'] for one in (0, 1)]
    assert counts == [2, 1]


def test_a_restarted_process_continues_the_counters_of_its_row(tmp_path: Path) -> None:
    first = exporter(counters=SharedCounters.create(tmp_path / "counters", 2))
    dead = exporter(counters=SharedCounters.attach(tmp_path / "counters", 1))
    dead.on_finished(RECORD)
    dead.on_live_requests(7)
    del dead
    successor = exporter(counters=SharedCounters.attach(tmp_path / "counters", 1))
    assert first.num_live_requests == 0, "what it was answering is over"
    successor.on_finished(dataclasses.replace(RECORD, finish_reason="length"))
    told = values(first)
    assert sum(value for name, value in told.items() if name.startswith("octavo:request_success_total")) == 2


def test_columns_are_the_same_for_all_and_end(tmp_path: Path) -> None:
    first, second = SharedCounters.create(tmp_path / "counters", 2), SharedCounters.attach(tmp_path / "counters", 1)
    one, other = first.allocate(3), second.allocate(3)
    one.own[1], other.own[1], other.own[2] = 0.5, 2.0, 1.0
    assert one.sums() == other.sums() == [0.0, 2.5, 1.0]
    with pytest.raises(AssertionError):
        first.allocate(NUM_COLUMNS)
