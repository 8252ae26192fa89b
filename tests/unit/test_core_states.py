"""Recurrent states in the core: their slots, the checkpoints that requests leave, and who continues from them."""

import itertools
import random
from pathlib import Path

import pytest
from core_fakes import CLIENT, FakeEngine, alone, cache_plan, core_config
from simulation.worker import SimulatedWorker

from octavo.core_proc.cache.copy_cost import CopyCost
from octavo.core_proc.cache.groups import NULL_BLOCK, CacheGroups, checkpoint_interval
from octavo.core_proc.recorder import Recorder, read_recording, replay
from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.observed import ObservedScheduler
from octavo.protocol.config import CacheGroupSpec
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit

BLOCK, INTERVAL = 4, 16
STATE = CacheGroupSpec(kind="state", window=INTERVAL, num_layers=1, block_bytes=1000)
MIXES = {
    "pure": [STATE],
    "hybrid": [CacheGroupSpec(num_layers=1, block_bytes=1000), STATE],
    "windows": [
        CacheGroupSpec(num_layers=1, block_bytes=1000),
        CacheGroupSpec(kind="window", window=9, num_layers=1, block_bytes=1000),
        STATE,
    ],
}
PROMPT = list(range(1, 39))


def run(engine: FakeEngine, request_id: str, prompt: list[int], max_tokens: int = 2, **fields):
    output = engine.submit(request_id, prompt, max_tokens, **fields)
    engine.run()
    return output


def slots_of(engine: FakeEngine) -> list[list[int]]:
    index = engine.scheduler.cache.groups.state.index
    return [[slot for slot in request.block_ids[index] if slot != NULL_BLOCK] for request in engine.scheduler.running]


@pytest.mark.parametrize("mix", MIXES)
def test_a_prefix_is_found_at_the_last_checkpoint_that_it_has(mix: str) -> None:
    engine = FakeEngine(64, MIXES[mix], max_num_batched_tokens=64)
    assert run(engine, "first", PROMPT).num_cached_tokens == 0
    again = run(engine, "again", PROMPT)
    assert again.num_cached_tokens == 32
    assert again.token_ids == alone(PROMPT, 2).token_ids
    assert run(engine, "common start", [*PROMPT[:20], *PROMPT]).num_cached_tokens == 16
    assert run(engine, "shorter than a block", PROMPT[:3]).num_cached_tokens == 0


@pytest.mark.parametrize("mix", MIXES)
def test_a_checkpoint_that_was_evicted_comes_back(mix: str) -> None:
    """Each prompt leaves two checkpoints, and the slots hold those of nine prompts."""
    engine = FakeEngine(18, MIXES[mix], max_num_seqs=1, max_num_batched_tokens=64, kv_offloading_bytes=400_000)
    prompts = [[number, *PROMPT[1:]] for number in range(10, 26)]
    for number, prompt in enumerate(prompts):
        run(engine, f"first {number}", prompt)
    assert not engine.worker.num_states_copied_in
    for number, prompt in enumerate(prompts):
        again = run(engine, f"again {number}", prompt)
        assert again.num_cached_tokens == 32
        assert again.token_ids == alone(prompt, 2).token_ids
    assert engine.worker.num_states_copied_in > len(prompts) - 9
    assert engine.scheduler.stats().external_prefix_cache_hits >= 32 * engine.worker.num_states_copied_in
    engine.replace_worker()
    assert run(engine, "lost", PROMPT).num_cached_tokens == 0


@pytest.mark.parametrize("mix", MIXES)
def test_an_evicted_state_is_not_copied_out_if_only_files_keep_contents(mix: str) -> None:
    engine = FakeEngine(18, MIXES[mix], max_num_seqs=1, max_num_batched_tokens=64, kv_offloading_path="/files")
    for number in range(20):
        run(engine, f"{number}", [number % 10 + 1, *PROMPT[1:]])
    stats = engine.scheduler.stats()
    assert stats.kv_offload_capacity_bytes and stats.external_prefix_cache_hits, "evicted states come from files"
    assert not any(plan.state_copies_out for plan in engine.plans)


def test_a_state_on_the_device_is_evicted_last_while_its_blocks_are_loaded() -> None:
    engine = FakeEngine(18, MIXES["hybrid"], max_num_batched_tokens=64, kv_offloading_path="/files")
    for first in (1, 2, 3):
        run(engine, f"first {first}", [first, *PROMPT[1:]])
    cache, prompt = engine.scheduler.cache, [1, *PROMPT[1:]]
    assert cache.states is not None
    cache.pool.forget_contents()  # files have them
    request = Request(CLIENT, Submit("again", prompt, SamplingSpec(max_tokens=1, seed=0)), 0, 0.0)
    slot = cache.states.pool.find_cached(cache.states.key(request, 32 // BLOCK))
    assert list(cache.states.pool.free_blocks())[-1] != slot
    output = engine.submit("again", prompt, 2)
    engine.plan()
    assert cache.loads.in_flight
    assert list(cache.states.pool.free_blocks())[-1] == slot
    engine.run()
    assert output.num_cached_tokens == 32


@pytest.mark.parametrize("mix", MIXES)
def test_a_prefix_is_computed_if_the_copy_of_its_state_takes_longer(mix: str) -> None:
    """Computed or copied, the result is the same."""
    engine = FakeEngine(
        18, MIXES[mix], max_num_seqs=1, max_num_batched_tokens=64, kv_offloading_bytes=400_000, host_block_s=1e-3
    )
    prompts = [[number, *PROMPT[1:]] for number in range(10, 26)]
    for number, prompt in enumerate(prompts):
        run(engine, f"first {number}", prompt)
    for token_s, num_cached in ((1e-6, 0), (1.0, 32)):
        engine.scheduler.cache.copy_cost.observe_step(token_s, 0.0)
        for prompt in prompts[:2]:
            again = run(engine, f"again {prompt[0]} {num_cached}", prompt)
            assert again.num_cached_tokens == num_cached
            assert again.token_ids == alone(prompt, 2).token_ids
        for number, prompt in enumerate(prompts[2:]):
            run(engine, f"between {num_cached} {number}", prompt)


@pytest.mark.parametrize("mix", MIXES)
def test_a_hit_ends_at_a_checkpoint_on_the_device_if_a_later_one_takes_too_long(mix: str) -> None:
    prompt = [number % 40 + 1 for number in range(65)]
    engine = FakeEngine(40, MIXES[mix], max_model_len=80, kv_offloading_bytes=400_000, host_block_s=1.0)
    run(engine, "first", prompt)
    states = engine.scheduler.cache.states
    assert states is not None and states.host is not None
    request = Request(CLIENT, Submit("again", prompt, SamplingSpec(max_tokens=1, seed=0)), 0, 0.0)
    key = states.key(request, 64 // BLOCK)
    slot = states.pool.find(key)
    assert slot is not None
    states.host.on_evicted(slot, key)
    states.pool.drop_hash(key)
    engine.scheduler.cache.copy_cost.observe_step(1e-6, 0.0)
    assert run(engine, "again", prompt).num_cached_tokens == 48, "not 32, which is half as far"
    assert engine.scheduler.stats().kv_offload_used_bytes == 1000, "the state is there"


def test_a_hit_ends_at_the_last_checkpoint_before_blocks_that_take_too_long() -> None:
    prompt = [number % 40 + 1 for number in range(65)]
    engine = FakeEngine(40, MIXES["hybrid"], max_model_len=80, kv_offloading_bytes=400_000, host_block_s=1.0)
    run(engine, "first", prompt)
    cache = engine.scheduler.cache
    assert cache.states is not None and cache.host is not None
    request = Request(CLIENT, Submit("again", prompt, SamplingSpec(max_tokens=1, seed=0)), 0, 0.0)
    assert cache.states.last_on_device(request, 64 // BLOCK) == 64 // BLOCK
    for key in request.block_hashes[48 // BLOCK : 64 // BLOCK]:
        cache.host.on_evicted(cache.pool.find_cached(key), key)
        cache.pool.drop_hash(key)
    cache.copy_cost.observe_step(1e-6, 0.0)
    assert cache.count_hits(request)[0].num_blocks == 48 // BLOCK, "not 32, which is half as far"


def test_a_checkpoint_is_copied_only_if_that_is_faster_than_computing() -> None:
    cost = CopyCost(1.0, BLOCK, host_state_s=100.0)
    cost.observe_step(token_s=1.0, key_s=0.0)
    zeros, ones = [0] * 26, [1] * 26
    assert cost.is_worth_it(0, zeros, zeros, state="host"), "104 tokens take longer than a state"
    assert not cost.is_worth_it(0, zeros[:24], zeros[:24], state="host")
    assert not cost.is_worth_it(0, ones, zeros, state="host"), "blocks that are copied too save less"
    assert cost.is_worth_it(0, ones, zeros, state="device")
    assert not cost.is_worth_it(0, zeros, zeros, state="files"), "it is read and then copied"
    assert cost.is_worth_it(0, zeros * 2, zeros * 2, state="files")
    for _ in range(20):
        cost.observe_load(0, 0, elapsed_s=250.0, num_states=1)
    assert not cost.is_worth_it(0, zeros * 2, zeros * 2, state="files"), "the file takes longer than a copy"


@pytest.mark.parametrize("mix", MIXES)
def test_a_prompt_leaves_a_checkpoint_before_its_last_block_if_it_saves_enough(mix: str) -> None:
    engine = FakeEngine(64, MIXES[mix], max_num_batched_tokens=64)
    prompt = PROMPT[:30]
    run(engine, "first", prompt)
    assert [part.num_tokens for plan in engine.plans for part in plan.scheduled][:3] == [16, 12, 2]
    assert run(engine, "again", prompt).num_cached_tokens == 28
    engine.plans.clear()
    run(engine, "short", PROMPT[1:7])
    assert engine.plans[0].scheduled[0].num_tokens == 6


@pytest.mark.parametrize("mix", MIXES)
def test_decodes_leave_checkpoints_for_the_next_turn_of_a_conversation(mix: str) -> None:
    engine = FakeEngine(64, MIXES[mix], max_num_batched_tokens=64, max_model_len=128)
    output = run(engine, "first", PROMPT[:6], 50)
    longer = [*PROMPT[:6], *output.token_ids, 1, 2, 3]
    again = run(engine, "again", longer)
    assert again.num_cached_tokens == (6 + len(output.token_ids) - 1) // INTERVAL * INTERVAL > 0
    assert again.token_ids == alone(longer, 2).token_ids


@pytest.mark.parametrize("mix", MIXES)
def test_equal_prompts_that_come_together_are_computed_once(mix: str) -> None:
    engine = FakeEngine(64, MIXES[mix], max_num_batched_tokens=128)
    outputs = [engine.submit(f"r{index}", PROMPT, 5) for index in range(4)]
    engine.run()
    assert [output.token_ids for output in outputs] == [alone(PROMPT, 5).token_ids] * 4
    assert [output.num_cached_tokens for output in outputs] == [0, 32, 32, 32]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_request_holds_no_more_slots_than_planned(mix: str, enable_prefix_caching: bool) -> None:
    engine = FakeEngine(64, MIXES[mix], max_num_batched_tokens=20, enable_prefix_caching=enable_prefix_caching)
    engine.submit("r", PROMPT, 20)
    most = 0
    while engine.scheduler.has_requests:
        engine.turn()
        most = max([most, *map(len, slots_of(engine))])
    engine.run()
    assert most == 1 + enable_prefix_caching
    assert bool(engine.scheduler.cache.states.pool.cached_blocks()) == enable_prefix_caching


def test_as_many_requests_run_as_there_are_slots_for() -> None:
    engine = FakeEngine(7, MIXES["pure"], max_num_batched_tokens=128)
    outputs = [engine.submit(f"r{index}", [index, *PROMPT[:20]], 8) for index in range(8)]
    engine.turn()
    assert (len(engine.scheduler.running), engine.scheduler.stats().waiting_reason) == (3, "states")
    engine.run()
    assert [len(output.token_ids) for output in outputs] == [8] * 8
    stats = engine.scheduler.stats()
    assert (stats.num_free_blocks, stats.num_blocks) == (7, 7)


def test_numbers_that_overflow_leave_no_checkpoint() -> None:
    engine = FakeEngine(64, MIXES["hybrid"], max_num_batched_tokens=64)
    engine.submit("r", PROMPT[:32], 9)
    while not engine.scheduler.cache.states.pool.cached_blocks():
        engine.turn()
    (request,) = engine.scheduler.running
    engine.scheduler.cache.invalidate_blocks(request)
    engine.abort("r")
    assert not engine.scheduler.cache.states.pool.cached_blocks()


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("seed", range(3))
def test_any_mix_of_requests_gives_the_tokens_of_each_alone(mix: str, seed: int) -> None:
    rng = random.Random(seed)
    engine = FakeEngine(
        rng.choice([26, 40]),
        MIXES[mix],
        max_num_batched_tokens=rng.choice([6, 24, 64]),
        max_num_seqs=rng.choice([3, 8]),
        block_size=BLOCK,
        long_prefill_token_threshold=rng.choice([0, 3, 10]),
        num_scheduler_steps=rng.choice([1, 2, 8]),
    )
    prompts = [[*PROMPT[: rng.randrange(1, 38)], *rng.choices(range(1, 40), k=rng.randrange(1, 8))] for _ in range(40)]
    outputs = []
    for index, prompt in enumerate(prompts):
        outputs.append(engine.submit(f"r{index}", prompt, 12))
        for _ in range(rng.randrange(4)):
            if engine.scheduler.has_requests:
                engine.turn()
        if rng.random() < 0.1:
            engine.abort(f"r{rng.randrange(index + 1)}")
    engine.run()
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = alone(prompt, 12).token_ids
        assert output.token_ids == expected[: len(output.token_ids)]
    assert engine.scheduler.counters.prefix_cache_hits > 0


def test_the_interval_grows_with_the_state() -> None:
    assert checkpoint_interval(1 << 10, 16) == 256
    assert checkpoint_interval(1 << 10, 48) == 288
    assert checkpoint_interval(55 << 20, 16) == 512
    assert checkpoint_interval(10 << 30, 16) == 2048
    groups = CacheGroups([CacheGroupSpec(kind="state", num_layers=1, block_bytes=55 << 20)], 16, 4096)
    assert (groups.max_chunk, groups.num_groups, groups.num_lists) == (512, 0, 1)


def test_a_recording_with_states_replays_identically(tmp_path: Path) -> None:
    path, config = tmp_path / "steps", core_config(max_num_batched_tokens=24)
    plan = cache_plan(config, 30, MIXES["hybrid"])
    recorder = Recorder(path, config, plan)
    scheduler = ObservedScheduler(config, plan, itertools.count().__next__, [recorder])
    worker = SimulatedWorker(config, 30, MIXES["hybrid"])
    for index in range(8):
        prompt = pack_ids(PROMPT[: 20 + index % 3 * 8])
        scheduler.submit(CLIENT, Submit(str(index), prompt, SamplingSpec(max_tokens=20, seed=index)))
    while (step := scheduler.plan()) is not None:
        scheduler.commit(worker.execute(step))
    recorder.close()
    assert scheduler.counters.num_preemptions and scheduler.counters.prefix_cache_hits
    assert replay(read_recording(path)).is_identical


@pytest.mark.parametrize("mix", MIXES)
def test_decodes_do_not_give_way_to_a_prompt_that_a_checkpoint_divides(mix: str) -> None:
    engine = FakeEngine(64, MIXES[mix], max_num_batched_tokens=64, decode_interval_tokens=100, async_scheduling=False)
    engine.submit("decoding", PROMPT[:4], 9)
    engine.turn()
    engine.turn()
    engine.submit("long", [9, *PROMPT[:20]], 1)
    engine.plans.clear()
    engine.run()
    assert engine.scheduled_tokens()[:3] == [[1, 16], [5], [1]]


@pytest.mark.parametrize("mix", MIXES)
def test_nobody_waits_for_the_checkpoint_of_a_request_that_is_preempted(mix: str) -> None:
    engine = FakeEngine(64, MIXES[mix], max_num_batched_tokens=24)
    engine.submit("r", PROMPT)
    engine.turn()
    (request,) = engine.scheduler.running
    assert request.num_computed_tokens == INTERVAL
    engine.scheduler.cache.free_passed_blocks()
    engine.scheduler.restrict(frozenset())
    assert engine.scheduler.cache.max_chunk(request, 0) == INTERVAL
