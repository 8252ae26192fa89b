"""Steps in flight of a pipeline: of different requests, of even size, and few stages wait."""

import random
from itertools import pairwise

import pytest
from core_fakes import CLIENT, FakeEngine, Output, core_config
from msgspec.structs import replace
from pipeline_simulation import Load, PipelineSimulation, StageTime

from octavo.protocol.events import Finished
from octavo.protocol.params import PoolingSpec
from octavo.protocol.pooling import PoolingFacts
from octavo.protocol.requests import Submit

ON_A_CPU = {"max_model_len": 1024, "block_size": 16, "full_step_tokens": 64, "decode_interval_tokens": 512}


def reads_weights(num_tokens: int) -> float:
    """A processor: up to a full step the weights take the time, beyond it the products."""
    return max(0.02, 0.0003 * num_tokens)


def costs_tokens(num_tokens: int) -> float:
    """A stage whose time depends most on the tokens."""
    return 0.005 + 0.0003 * num_tokens


@pytest.mark.parametrize("stage_s", [reads_weights, costs_tokens])
@pytest.mark.parametrize(("num_stages", "most"), [(2, 0.15), (4, 0.25)])
def test_stages_wait_for_a_small_part_of_the_time(num_stages: int, most: float, stage_s: StageTime) -> None:
    load = Load(8 * num_stages, 24 * num_stages, prompt_tokens=(50, 800), output_tokens=(10, 60))
    simulation = PipelineSimulation(num_stages, stage_s, max_num_seqs=64, max_num_batched_tokens=512, **ON_A_CPU)
    usage = simulation.run(load)
    assert usage.bubble <= most
    assert usage.seconds > 0.5, "the load ended before anything was measured"


def test_one_step_of_all_requests_would_let_stages_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(16, 32, prompt_tokens=(2, 2), output_tokens=(30, 30))
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 256, **ON_A_CPU}
    shared = PipelineSimulation(2, reads_weights, **settings).run(load)
    simulation = PipelineSimulation(2, reads_weights, **settings)
    monkeypatch.setattr(
        simulation.scheduler._planner._turns, "max_decodes", lambda num_decoding, num_in_flight: num_decoding
    )
    alone = simulation.run(load)
    assert shared.bubble < 0.1 < 0.3 < alone.bubble


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("num_blocks", [24, 64])
def test_random_requests_keep_every_rule(num_stages: int, num_blocks: int) -> None:
    rng = random.Random(num_stages)
    engine = FakeEngine(num_blocks, pipeline_parallel_size=num_stages, world_size=num_stages)
    alone = FakeEngine()
    outputs = {}
    for index in range(40):
        request = (f"r{index}", [rng.randrange(1, 50) for _ in range(rng.randint(1, 40))], rng.randint(1, 20))
        outputs[request[0]] = engine.submit(*request, seed=index), alone.submit(*request, seed=index)
        alone.run()
        for _ in range(rng.randint(0, 6)):
            if engine.scheduler.has_requests:
                engine.turn()
        if rng.random() < 0.1:
            engine.abort(f"r{rng.randrange(index + 1)}")
    engine.run()
    ended = [pair for pair in outputs.values() if pair[0].end.reason.name != "ABORT"]
    assert len(ended) > 30
    assert all(output.token_ids == expected.token_ids for output, expected in ended)
    assert engine.scheduler.counters.num_preemptions > 0 or num_blocks > 24


def test_steps_in_flight_decode_different_requests_evenly() -> None:
    engine = FakeEngine(pipeline_parallel_size=2, world_size=2)
    for index in range(8):
        engine.submit(f"r{index}", [1, 2], max_tokens=20)
    for _ in range(12):
        engine.turn()
    decodes = [{part.slot for part in plan.scheduled} for plan in engine.plans[-4:]]
    assert [len(slots) for slots in decodes] == [4, 4, 4, 4]
    assert all(first.isdisjoint(second) for first, second in pairwise(decodes))


def test_tokens_return_with_the_next_plan_unless_the_request_has_left_or_enters_again() -> None:
    engine = FakeEngine(pipeline_parallel_size=2, world_size=2)
    engine.submit("a", [1, 2, 3], max_tokens=9)
    engine.submit("b", [4, 5, 6], max_tokens=9)
    engine.plan()
    engine.commit()
    engine.abort("b")
    known = engine.outputs["a"].token_ids[:]
    plan = engine.plan()
    assert [token_id for _, token_id in plan.sampled] == known
    engine.commit()
    engine.scheduler.restrict(frozenset())  # preempts it
    engine.scheduler.restrict(None)
    plan = engine.plan()
    assert [list(admitted.token_ids) for admitted in plan.admitted] == [[1, 2, 3, *engine.outputs["a"].token_ids]]
    assert plan.sampled == []


def test_chunks_of_a_prompt_are_in_several_steps_at_once() -> None:
    engine = FakeEngine(pipeline_parallel_size=2, world_size=2, max_num_batched_tokens=8)
    engine.submit("a", list(range(1, 41)), max_tokens=2)
    plans = [engine.plan(), engine.plan()]
    assert [(part.start, part.num_tokens) for plan in plans for part in plan.scheduled] == [(0, 8), (8, 8)]


def test_lost_workers_take_the_tokens_along() -> None:
    engine = FakeEngine(pipeline_parallel_size=2, world_size=2)
    engine.submit("a", [1, 2, 3], max_tokens=9)
    engine.plan()
    engine.commit()
    engine.scheduler.lose_workers()
    engine.worker.rows.clear()
    plan = engine.plan()
    assert plan.sampled == []
    assert [len(admitted.token_ids) for admitted in plan.admitted] == [4]


@pytest.mark.parametrize("num_stages", [2, 4])
def test_prompts_that_fill_the_steps_planned_ahead_do_not_stop_decodes(num_stages: int) -> None:
    settings = {"max_model_len": 1024, "max_num_batched_tokens": 16, "world_size": num_stages}
    engine = FakeEngine(256, pipeline_parallel_size=num_stages, **settings)
    streams = [engine.submit(f"stream{index}", [1, 2], max_tokens=200) for index in range(4)]
    for _ in range(20):
        engine.turn()
    known = [len(stream.token_ids) for stream in streams]
    engine.submit("prompt", [3] * 800, max_tokens=1)
    while engine.outputs["prompt"].end is None:
        engine.turn()
    gained = [len(stream.token_ids) - before for stream, before in zip(streams, known, strict=True)]
    num_turns = 800 // 16 // num_stages
    assert min(gained) > num_turns // 2


def test_decodes_do_not_wait_for_a_prompt_that_takes_several_steps() -> None:
    """It would fit in one, but a step of a pipeline has a share of it: the wait would not end with this step."""
    settings = {"max_model_len": 1024, "max_num_batched_tokens": 512, "full_step_tokens": 64, "world_size": 2}
    engine = FakeEngine(256, pipeline_parallel_size=2, decode_interval_tokens=512, **settings)
    engine.submit("stream", [1, 2], max_tokens=200)
    for _ in range(6):
        engine.turn()
    engine.submit("prompt", [3] * 400, max_tokens=1)
    first = len(engine.plans)
    while engine.outputs["prompt"].end is None:
        engine.turn()
    slots = [[part.slot for part in plan.scheduled] for plan in engine.plans[first:]]
    assert slots[:6] == [[0, 1], [1]] * 3, "as soon as the last token is known"


@pytest.mark.parametrize("full_step_tokens", [0, 16])
def test_a_prompt_that_must_be_computed_whole_may_exceed_its_share_of_a_step(full_step_tokens: int) -> None:
    pooling = PoolingFacts(convert="embed", pooling="last", is_causal=False)
    settings = {"model": replace(core_config().model, pooling=pooling), "enable_prefix_caching": False}
    limits = {"max_model_len": 800, "max_num_batched_tokens": 1024, "full_step_tokens": full_step_tokens}
    engine = FakeEngine(512, pipeline_parallel_size=2, world_size=2, max_num_seqs=64, **settings, **limits)
    lengths = [800, *[20] * 30, 300, 700]
    for index, length in enumerate(lengths):
        engine.outputs[str(index)] = Output()
        submit = Submit(str(index), [1] * length, PoolingSpec("embed", "last"))
        engine._take(engine.scheduler.submit(CLIENT, submit))
    engine.run()
    assert all(isinstance(output.end, Finished) for output in engine.outputs.values())
    assert len(engine.plans) > 3, "not all of them in one step"
