"""Blocks, their names, and the prefix cache built of both."""

import pytest
from core_fakes import FakeEngine, alone

from octavo.core_proc.cache.hashing import chain_hash, root_hash
from octavo.core_proc.cache.pool import BlockPool, OutOfBlocks


def name(number: int) -> bytes:
    return bytes([number]) * 4


def test_blocks_without_content_are_reused_first_then_the_least_recently_freed():
    pool = BlockPool(6)
    first, second, plain = [pool.take(), pool.take()], [pool.take(), pool.take()], [pool.take()]
    for index, block_id in enumerate([*first, *second]):
        pool.name(block_id, name(index))
    pool.release(first)
    pool.release(second)
    pool.release(plain)
    assert list(pool.free_blocks()) == [4, 5, 1, 0, 3, 2]
    assert pool.num_free == 6


def test_a_block_taken_for_something_else_is_forgotten():
    pool = BlockPool(1)
    pool.name(pool.take(), name(1))
    assert pool.find(name(1)) == 0
    pool.release([0])
    assert pool.find(name(1)) == 0
    pool.take()
    assert pool.find(name(1)) is None
    with pytest.raises(OutOfBlocks):
        pool.take()


def test_a_found_block_leaves_the_free_list():
    pool = BlockPool(3)
    pool.name(pool.take(), name(1))
    pool.release([0])
    pool.hold(0)
    pool.hold(0)
    assert (pool.num_references(0), pool.num_free, list(pool.free_blocks())) == (2, 2, [1, 2])
    pool.release([0])
    assert pool.num_free == 2
    pool.release([0])
    assert list(pool.free_blocks()) == [1, 2, 0]


def test_the_second_block_of_equal_content_stays_unnamed():
    pool = BlockPool(2)
    pool.name(pool.take(), name(1))
    pool.name(pool.take(), name(1))
    assert (pool.find(name(1)), pool.block_hash(1)) == (0, None)


def test_forgetting_is_refused_while_a_block_is_in_use():
    pool = BlockPool(2)
    pool.name(pool.take(), name(1))
    assert not pool.forget_contents()
    assert pool.find(name(1)) == 0
    pool.release([0])
    assert pool.forget_contents()
    assert pool.named_blocks() == {}
    assert pool.block_hash(0) is None


def test_hashes_depend_on_everything_before_and_on_nothing_else():
    root = root_hash(None, None)
    assert chain_hash(root, [1, 2]) == chain_hash(root_hash(None, None), (1, 2))
    different = {
        chain_hash(root, [1, 2]),
        chain_hash(root, [2, 1]),
        chain_hash(chain_hash(root, [1, 2]), [1, 2]),
        chain_hash(root_hash("salt", None), [1, 2]),
        chain_hash(root_hash(None, "salt"), [1, 2]),
        chain_hash(root_hash("", None), [1, 2]),
    }
    assert len(different) == 6


PROMPT = list(range(1, 15))


def run(engine: FakeEngine, request_id: str, prompt: list[int], max_tokens: int = 2, **fields):
    output = engine.submit(request_id, prompt, max_tokens, **fields)
    engine.run()
    return output


def test_an_equal_prompt_hits_all_full_blocks_but_never_its_last_token():
    engine = FakeEngine()
    assert run(engine, "first", PROMPT).num_cached_tokens == 0
    assert run(engine, "second", PROMPT).num_cached_tokens == 12
    assert run(engine, "whole blocks", PROMPT[:12]).num_cached_tokens == 8
    assert run(engine, "longer", [*PROMPT, 9, 9]).num_cached_tokens == 12
    assert run(engine, "other", [9, *PROMPT]).num_cached_tokens == 0
    stats = engine.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (14 + 14 + 12 + 16 + 15, 12 + 8 + 12)
    assert stats.prompt_tokens == 14 + 14 + 12 + 16 + 15


def test_outputs_are_found_by_the_next_turn_of_a_conversation():
    engine = FakeEngine()
    first = run(engine, "first", PROMPT, max_tokens=10)
    assert run(engine, "second", [*PROMPT, *first.token_ids, 5]).num_cached_tokens == 20


@pytest.mark.parametrize("fields", [{"cache_salt": "b"}, {"cache_salt": None}, {"cache_salt": "a", "adapter": "x"}])
def test_salt_and_adapter_keep_equal_prompts_apart(fields):
    engine = FakeEngine()
    run(engine, "first", PROMPT, cache_salt="a")
    assert run(engine, "second", PROMPT, **fields).num_cached_tokens == 0
    assert run(engine, "third", PROMPT, cache_salt="a").num_cached_tokens == 12


def test_without_prefix_caching_nothing_is_found():
    engine = FakeEngine(enable_prefix_caching=False)
    run(engine, "first", PROMPT)
    assert run(engine, "second", PROMPT).num_cached_tokens == 0
    assert engine.scheduler.stats().prefix_cache_queries == 0


def test_a_request_may_decline_to_read_the_cache_and_still_fills_it():
    engine = FakeEngine()
    run(engine, "first", PROMPT, skip_reading_prefix_cache=True)
    assert run(engine, "second", PROMPT, skip_reading_prefix_cache=True).num_cached_tokens == 0
    assert run(engine, "third", PROMPT).num_cached_tokens == 12


def test_equal_prompts_of_one_step_share_its_blocks():
    engine = FakeEngine()
    first = engine.submit("first", PROMPT, 1)
    second = engine.submit("second", PROMPT, 1)
    plan = engine.plan()
    assert [(part.start, part.num_tokens) for part in plan.scheduled] == [(0, 14), (12, 2)]
    engine.run()
    assert first.token_ids == second.token_ids
    assert second.num_cached_tokens == 12


def test_equal_long_prompts_are_computed_about_once():
    """Each of them goes on where any of them has come to, step after step."""
    engine = FakeEngine(max_model_len=256, max_num_batched_tokens=32)
    prompt = [index % 40 + 1 for index in range(203)]
    for index in range(4):
        engine.submit(str(index), prompt, 1)
    engine.run()
    assert engine.worker.num_computed_tokens < 1.5 * len(prompt)


def test_eviction_takes_the_tail_of_the_oldest_sequence_first():
    engine = FakeEngine(num_blocks=8, max_model_len=32)
    run(engine, "old", [1] * 13, 1)
    run(engine, "new", [2] * 13, 1)
    run(engine, "third", [3] * 10, 1)  # takes two blocks without content and one with
    assert run(engine, "old again", [1] * 13, 1).num_cached_tokens == 8
    assert run(engine, "new again", [2] * 13, 1).num_cached_tokens == 8


def test_reset_is_refused_while_in_use():
    engine = FakeEngine()
    engine.submit("r", PROMPT)
    engine.plan()
    assert not engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    assert run(engine, "again", PROMPT).num_cached_tokens == 0


def test_a_preempted_request_finds_its_own_blocks_and_does_not_count_them_as_cached():
    engine = FakeEngine(num_blocks=8, max_model_len=32)
    outputs = [engine.submit(str(i), [i + 1] * 8, 16) for i in range(2)]
    engine.run()
    assert outputs[1].end.num_preemptions > 0
    assert outputs[1].end.num_cached_tokens == 0
    assert outputs[1].token_ids == alone([2] * 8, 16).token_ids
