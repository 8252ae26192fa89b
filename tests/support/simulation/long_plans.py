"""Changes a scenario so that its plans have several steps, and requests that arrive interrupt them."""

import random
from dataclasses import replace
from typing import Any

from core_fakes import core_config
from msgspec import structs

from octavo.core_proc.cache.groups import CacheGroups
from octavo.protocol.params import SamplingSpec
from simulation.scenario import Ask, Scenario
from simulation.worker import ONE_GROUP

SHARE_OF_SMALL_BUDGETS = 0.6
"""Share of the scenarios whose token budget limits the steps of a plan, and hardly exceeds windows."""


def with_long_plans(scenario: Scenario) -> Scenario:
    """Return a scenario in which few requests run at a time and each of them generates many tokens.

    A scenario of pooling requests is returned as it is. Models with recurrent states are mostly replaced: their plans
    are not interrupted.
    """
    if scenario.engine["model"].pooling is not None:
        return scenario
    rng = random.Random(f"long plans {scenario.seed}")
    limits: dict[str, Any] = {"num_scheduler_steps": rng.choice([2, 8, 8, 16, 64])}
    if rng.random() < SHARE_OF_SMALL_BUDGETS and scenario.engine.get("media") is None:
        limits["max_num_batched_tokens"] = rng.choice([4, 8, 8, 16, 32])
    limits["max_num_seqs"] = rng.choice([scenario.engine["max_num_seqs"], 2, 4, 8])
    limits["step_time_target_s"] = rng.choice([0.0, 0.0, 0.0, 0.05])
    engine = scenario.engine | limits
    engine |= {"async_scheduling": True, "speculation": None, "pipeline_parallel_size": 1}
    groups = scenario.groups
    if rng.random() < 0.9:
        groups = [group for group in groups if group.kind != "state"] or ONE_GROUP
    pace = rng.choice([3, 10, 30])
    max_request_blocks = CacheGroups.of(core_config(**engine), groups).max_request_blocks(engine["max_model_len"])
    return replace(
        scenario,
        engine=engine,
        groups=groups,
        num_blocks=max(scenario.num_blocks, max_request_blocks + rng.choice([0, 0, 1, 5, 30])),
        step_scale=scenario.step_scale * rng.choice([0.1, 0.3, 1.0]),
        asks=[replace(_with_many_tokens(ask, rng), time=pace * ask.time) for ask in scenario.asks],
        faults=[replace(fault, time=pace * fault.time) for fault in scenario.faults],
    )


def _with_many_tokens(ask: Ask, rng: random.Random) -> Ask:
    assert isinstance(ask.submit.params, SamplingSpec)
    stops = {} if rng.random() < 0.2 else {"eos_token_ids": (), "stop_token_ids": ()}
    params = structs.replace(ask.submit.params, max_tokens=rng.randint(8, 60), **stops)
    grammar = ask.submit.grammar if rng.random() < 0.1 else None
    return replace(ask, submit=structs.replace(ask.submit, params=params, grammar=grammar))
