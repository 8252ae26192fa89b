"""scripts/bench_core measures a real core process: scenarios with real processes, and the scheduler alone."""

import pytest
from bench_core_parts import http_health, scenarios


def test_a_queue_is_filled_aborted_and_lost() -> None:
    figures = scenarios.queue(20, prompt_len=20, num_aborts=10)
    assert {name.partition(": ")[2].split()[0] for name in figures} == {
        "intake",
        "intake,",
        "core",
        "abort",
        "abort,",
        "loss",
        "loss,",
    }


def test_the_scheduler_alone_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenarios, "MIN_STEPS", 5)
    ((_, us_per_step),) = scenarios.plan_and_commit(2, window_s=0.0).items()
    assert us_per_step > 0


def test_health_is_probed_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_health, "PHASE_S", 0.05)
    figures = http_health.health(2, num_waiting=4, num_lost=4)
    phases = {name.rpartition(":")[0] for name in figures}
    assert len(phases) == 5 and len(figures) == 4 * len(phases)
    assert all(value > 0 for value in figures.values())
