"""Engines of `scripts/simulate_routing`, and that the router knows of their states what it needs."""

import pytest
from simulate_routing import simulate
from simulate_routing_parts.engine import Capacity, Engine


def test_an_engine_continues_only_from_states() -> None:
    engine = Engine(Capacity(num_spans=100, num_states=3, state_interval=256))
    assert engine.lookup(list(range(10))) == 0
    assert list(engine.states) == [3, 7, 9], "after 256 and 512 tokens, and at the end"
    assert engine.lookup([*range(7), 100]) == 4
    assert engine.lookup(list(range(10))) == 10
    assert engine.lookup([*range(8), 200]) == 4, "the state after 512 tokens has made place"
    assert Engine(Capacity(num_spans=100)).lookup([1, 2]) == 0


@pytest.mark.parametrize("state_interval", [0, 512])
def test_prefixes_find_more_than_turns(state_interval: int) -> None:
    capacity = Capacity(500, 100, state_interval)
    by_prefix, in_turn = (
        simulate(policy, 4, 2, 400, death_every_s=2.0, seed=1, capacity=capacity)
        for policy in ("prefix", "round_robin")
    )
    assert by_prefix["deaths"] == in_turn["deaths"] > 0
    assert by_prefix["hit_rate"] > 1.3 * in_turn["hit_rate"] > 0
