"""Placements of experts in `scripts/simulate_experts`."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "simulate_experts.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulate_experts", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("num_replicas", [0, 5, 16])
def test_every_expert_has_a_rank_and_no_rank_has_more_than_its_share(
    script: ModuleType, num_ranks: int, num_replicas: int
) -> None:
    counts = np.random.default_rng(1).integers(0, 1000, 40) ** 2
    placement = script.by_load(counts, num_ranks, num_replicas)
    assert all(ranks and len(set(ranks)) == len(ranks) for ranks in placement.ranks)
    assert max(placement.num_held) <= -(-(40 + num_replicas) // num_ranks)
    assert np.isclose(placement.loads(counts).sum(), counts.sum())
    assert placement == script.by_load(counts, num_ranks, num_replicas)


def test_a_hot_expert_is_divided_between_ranks(script: ModuleType) -> None:
    counts = np.array([800, 100, 100, 100, 100, 100, 100, 100])
    alone, divided = script.by_load(counts, 4, 0), script.by_load(counts, 4, 4)
    assert alone.balance(counts) < 0.5 < 0.9 < divided.balance(counts)
    assert len(divided.ranks[0]) > 1


def test_placing_by_load_is_better_than_in_order(script: ModuleType) -> None:
    steps = script.draw_steps(20, 256, 32, 4, skew=1.0, drift=0.01, seed=2)
    assert all(counts.sum() == 256 * 4 and counts.max() <= 256 for counts in steps)
    in_order, by_load = (script.measure(steps, 4, 0, 10, name) for name in ("in order", "by load"))
    assert by_load > in_order
    assert script.in_order(steps[0], 4, 0).num_held == [8, 8, 8, 8]
