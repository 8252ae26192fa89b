"""Slots of LoRA adapters: who waits, what is loaded and evicted, what fails, and what the prefix cache may share.

The simulated worker rejects a plan that reads a block of another adapter or loads into a slot that is in use.
"""

import random

import pytest
from core_fakes import FakeEngine, alone

from octavo.core_proc.scheduler.adapter_slots import MAX_BYPASS
from octavo.protocol.adapters import Adapter
from octavo.protocol.config.facts import CacheGroupSpec
from octavo.protocol.config.lora import ResolvedLoRA
from octavo.protocol.events import Failed, FailureKind, Finished

STATE = CacheGroupSpec(kind="state", window=4, num_layers=1, block_bytes=1000)


def adapter(name: str, rank: int = 8, digest: str = "") -> Adapter:
    return Adapter(name, digest or f"digest of {name}", f"/adapters/{name}", rank)


def engine_with(max_loras: int, **settings) -> FakeEngine:
    lora = ResolvedLoRA(max_loras=max_loras, max_rank=16, max_cpu_loras=max_loras, dtype="float32")
    return FakeEngine(lora=lora, **settings)


def started(engine: FakeEngine) -> list[str]:
    return [admitted.request_id for plan in engine.plans for admitted in plan.admitted]


def loads(engine: FakeEngine) -> list[tuple[int, str]]:
    return [(load.slot, load.adapter.name) for plan in engine.plans for load in plan.adapter_loads]


def test_many_requests_for_a_taken_slot_hold_up_nobody() -> None:
    engine = engine_with(1, async_scheduling=False)
    engine.submit("holder", [1, 2], 20, adapter=adapter("a"))
    engine.turn()
    for index in range(200):
        engine.submit(f"b{index}", [index % 40 + 1] * 3, 1, adapter=adapter("b"))
    engine.submit("base", [3, 4], 1)
    engine.submit("same", [3, 4], 1, adapter=adapter("a"))
    engine.turn()
    engine.turn()
    assert started(engine) == ["holder", "base", "same"]
    stats = engine.scheduler.stats()
    assert (stats.waiting_reason, stats.running_adapters, stats.waiting_adapters) == ("adapter", ["a"], ["b"])
    engine.run()
    assert loads(engine) == [(0, "a"), (0, "b")], "each adapter is loaded once"


def test_the_adapter_that_was_used_least_recently_leaves() -> None:
    engine = engine_with(2)
    for name in "ababcab":
        engine.submit(f"{name}{len(engine.outputs)}", [1, 2, 3], 2, adapter=adapter(name))
        engine.run()
    assert loads(engine) == [(0, "a"), (1, "b"), (0, "c"), (1, "a"), (0, "b")]


def test_a_stream_of_requests_with_a_loaded_adapter_does_not_starve_another() -> None:
    engine = engine_with(1, async_scheduling=False, max_num_seqs=4)
    for index in range(4):
        engine.submit(f"first{index}", [1, 2], 3 + index, adapter=adapter("a"))
    engine.turn()
    engine.submit("other", [1, 2], 1, adapter=adapter("b"))
    for index in range(4 * MAX_BYPASS):
        engine.submit(f"later{index}", [1, 2], 3 + index % 3, adapter=adapter("a"))
    engine.submit("base", [1, 2], 1)
    engine.run(100_000)
    order = started(engine)
    assert order.index("base") == 4 + MAX_BYPASS and order.index("other") == 4 + MAX_BYPASS + 1
    assert loads(engine) == [(0, "a"), (0, "b"), (0, "a")]


def test_one_slot_drains_while_the_others_go_on() -> None:
    engine = engine_with(2, async_scheduling=False, max_num_seqs=4)
    for name in "ab":
        engine.submit(f"{name}-first", [1, 2], 5, adapter=adapter(name))
    engine.turn()
    engine.submit("c", [1, 2], 1, adapter=adapter("c"))
    for index in range(3 * MAX_BYPASS):
        name = "ab"[index % 2]
        engine.submit(f"{name}{index}", [1, 2], 5, adapter=adapter(name))
    engine.run(100_000)
    order, when = started(engine), [plan for plan in engine.plans if plan.adapter_loads]
    assert MAX_BYPASS <= order.index("c") <= MAX_BYPASS + 20
    assert [len(plan.adapter_loads) for plan in when][:2] == [2, 1] and len(loads(engine)) <= 5


def test_the_end_of_a_delayed_request_opens_a_draining_slot() -> None:
    engine = engine_with(1, async_scheduling=False, max_num_seqs=2, max_model_len=500, num_blocks=200)
    engine.submit("long", [1, 2], 400, adapter=adapter("a"))
    engine.turn()
    engine.submit("other", [1, 2], 1, adapter=adapter("b"))
    for index in range(MAX_BYPASS + 1):
        engine.submit(f"{index}", [1, 2], 1, adapter=adapter("a"))
    while f"{MAX_BYPASS - 1}" not in started(engine):
        engine.turn()
    for _ in range(4):
        engine.turn()
    assert f"{MAX_BYPASS}" not in started(engine), "the slot drains"
    engine.abort("other")
    engine.run()
    assert started(engine)[-1] == f"{MAX_BYPASS}" and loads(engine) == [(0, "a")]


def test_prefixes_are_shared_by_content_and_not_by_name() -> None:
    engine = engine_with(2)
    prompt = list(range(1, 13))
    engine.submit("old", prompt, 2, adapter=adapter("sql", digest="one"))
    engine.run()
    reloaded = engine.submit("reloaded", prompt, 2, adapter=adapter("sql", digest="two"))
    engine.run()
    renamed = engine.submit("renamed", prompt, 2, adapter=adapter("other name", digest="one"))
    base = engine.submit("base", prompt, 2)
    engine.run()
    assert (reloaded.num_cached_tokens, renamed.num_cached_tokens, base.num_cached_tokens) == (0, 8, 0)
    assert [name for _, name in loads(engine)] == ["sql", "sql"], "equal contents share a slot"


def test_an_adapter_that_cannot_be_loaded_fails_its_own_requests_only() -> None:
    engine = engine_with(2, num_blocks=200, max_num_seqs=16)
    damaged = adapter("bad", digest="damaged")
    prompt = list(range(1, 13))
    for index in range(3):
        engine.submit(f"bad{index}", prompt, 5, adapter=damaged)
        engine.submit(f"good{index}", prompt, 5, adapter=adapter("good"))
        engine.submit(f"base{index}", prompt, 5)
    engine.plan()
    engine.abort("bad1")
    engine.plan()
    engine.submit("bad later", prompt, 5, adapter=damaged)
    engine.run()
    for name, output in engine.outputs.items():
        if name.startswith("bad") and name != "bad1":
            assert isinstance(output.end, Failed) and output.token_ids == []
            assert (output.end.kind, output.end.message) == (FailureKind.INVALID, "bad is damaged")
        else:
            assert isinstance(output.end, Finished)
    assert engine.outputs["base0"].token_ids == alone(prompt, 5).token_ids
    assert not any(engine.scheduler.adapters.num_users)


@pytest.mark.parametrize("takes_slot", [False, True])
def test_nothing_that_was_computed_without_its_adapter_stays_in_the_cache(takes_slot: bool) -> None:
    engine = engine_with(1)
    prompt, damaged = list(range(1, 13)), adapter("bad", digest="damaged")
    engine.submit("aborted", prompt, 5, adapter=damaged)
    engine.plan()
    engine.abort("aborted")
    if takes_slot:
        engine.submit("next", [1, 2], 1, adapter=adapter("good"))
        engine.plan()
        assert loads(engine) == [(0, "bad"), (0, "good")], "before the core knows of the fault"
    engine.run()
    assert engine.scheduler.cache.pool.cached_blocks() == {}


def test_a_request_that_no_step_computes_yet_fails_with_its_adapter() -> None:
    engine = engine_with(1, groups=[STATE], enable_prefix_caching=True)
    prompt, damaged = list(range(1, 13)), adapter("bad", digest="damaged")
    for name in ("first", "second"):
        engine.submit(name, prompt, 5, adapter=damaged)
    plan = engine.plan()
    assert plan and len(plan.admitted) == 2 and len(plan.scheduled) == 1, "the second waits for the first's checkpoint"
    engine.run()
    assert all(isinstance(output.end, Failed) for output in engine.outputs.values())


def test_requests_that_no_engine_can_serve_are_rejected() -> None:
    output = FakeEngine().submit("r", [1], adapter=adapter("sql"))
    assert isinstance(output.end, Failed) and output.end.param == "model" and "--enable-lora" in output.end.message
    output = engine_with(1).submit("r", [1], adapter=adapter("sql", rank=17))
    assert isinstance(output.end, Failed) and "rank 17, but the limit is 16 (--max-lora-rank)" in output.end.message


def test_new_workers_load_adapters_again() -> None:
    engine = engine_with(2)
    outputs = [engine.submit(name, [1, 2, 3, 4, 5], 9, adapter=adapter(name)) for name in "abc"]
    for _ in range(4):
        engine.turn()
    before = len(loads(engine))
    engine.replace_worker()
    engine.run()
    assert before == 2 and len(loads(engine)) == 5
    assert all(isinstance(output.end, Finished) for output in outputs)


@pytest.mark.parametrize("max_loras", [1, 3])
@pytest.mark.parametrize("pipeline_parallel_size", [1, 2])
def test_random_requests_finish_with_the_right_adapter(max_loras: int, pipeline_parallel_size: int) -> None:
    source = random.Random(max_loras)
    engine = engine_with(max_loras, num_blocks=30, max_num_seqs=6, pipeline_parallel_size=pipeline_parallel_size)
    adapters = [None, *map(adapter, "abcdefgh")]
    for index in range(150):
        prompt = list(range(1, source.randint(2, 16)))
        engine.submit(str(index), prompt, source.randint(1, 12), adapter=source.choice(adapters))
        for _ in range(source.randint(0, 3)):
            if engine.scheduler.has_requests:
                engine.turn()
    engine.run(100_000)
    assert all(isinstance(output.end, Finished) for output in engine.outputs.values())
    assert engine.worker.num_adapter_loads == len(loads(engine)) > max_loras
