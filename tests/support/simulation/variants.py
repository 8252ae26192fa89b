"""Scenarios that differ from those that `draw_scenario` draws, each for paths that these seldom reach."""

import random
from collections.abc import Callable
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
    """Return a scenario whose plans have several steps, and are interrupted by requests that arrive: few of these run
    at a time, and each of them generates many tokens.

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


def with_step_limits(scenario: Scenario) -> Scenario:
    """Return a scenario whose steps have a full size and a target duration, and may omit decodes, as on a CPU."""
    rng, pooling = random.Random(f"step limits {scenario.seed}"), scenario.engine["model"].pooling
    limits: dict[str, Any] = {
        "full_step_tokens": rng.choice([0, 1, 4, 12, 64, 300]),
        "decode_interval_tokens": rng.choice([0, 1, 8, 30, 200, 1000]),
        "step_time_target_s": rng.choice([0.0, 0.001, 0.005, 0.02, 0.1]),
        "kv_offloading_recompute": rng.random() < 0.5,
    }
    if pooling is not None and not pooling.is_causal:
        limits["step_time_target_s"] = 0.0  # refused for prompts that are computed whole
    return replace(scenario, engine=scenario.engine | limits)


VARIANTS: dict[str, Callable[[Scenario], Scenario]] = {"long-plans": with_long_plans, "step-limits": with_step_limits}
"""Functions that change a drawn scenario, by the name that `scripts/stress --variant` takes."""
