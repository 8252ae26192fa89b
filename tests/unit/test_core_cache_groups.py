"""Plans for a model with several KV cache groups."""

import itertools

import msgspec
from core_fakes import CLIENT, cache_plan, core_config

from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit
from octavo.protocol.steps import StepPlan, StepResult


def plans(num_groups: int) -> list[StepPlan]:
    """The plans of one request that grows over several blocks of four tokens, and of one that shares its prefix."""
    config = core_config(async_scheduling=False)
    one_group = cache_plan(config, 16)
    plan = msgspec.structs.replace(one_group, blocks_per_group=[16] * num_groups)
    scheduler = Scheduler(config, plan, itertools.count(1.0).__next__)
    made = []
    for name in "ab":
        scheduler.submit(CLIENT, Submit(name, pack_ids(range(9)), SamplingSpec(max_tokens=8, seed=0)))
        while (step := scheduler.plan()) is not None:
            made.append(step)
            scheduler.commit(StepResult(step.sequence, pack_ids([7] * len(step.scheduled)), [], []))
    return made


def test_plans_have_the_same_blocks_for_every_cache_group() -> None:
    one, three = plans(1), plans(3)
    assert sum(len(plan.appended) for plan in one) == 2
    assert len(one) == len(three)
    for single, triple in zip(one, three, strict=True):
        assert triple.scheduled == single.scheduled
        for few, many in zip((*single.admitted, *single.appended), (*triple.admitted, *triple.appended), strict=True):
            assert len(few.block_ids) == 1
            assert many.block_ids == few.block_ids * 3
