"""scripts/bench_core measures a real core process: one scenario with real processes, and the scheduler alone."""

import pytest
from bench_core_parts import scenarios


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
