"""Blocks, their hashes, and the prefix cache."""

from array import array

import pytest
from core_fakes import FakeEngine, alone

from octavo.core_proc.cache.pool import BlockPool, OutOfBlocks
from octavo.protocol.adapters import Adapter
from octavo.protocol.prefix_hash import ROOT_HASH, ExtraKey, hash_block


def name(number: int) -> bytes:
    return bytes([number]) * 4


def test_blocks_without_content_are_reused_first_then_the_least_recently_freed():
    pool = BlockPool(6)
    first, second, plain = [pool.allocate(), pool.allocate()], [pool.allocate(), pool.allocate()], [pool.allocate()]
    for index, block_id in enumerate([*first, *second]):
        pool.set_hash(block_id, name(index))
    pool.release(first)
    pool.release(second)
    pool.release(plain)
    assert list(pool.free_blocks()) == [4, 5, 1, 0, 3, 2]
    assert pool.num_free == 6


def test_a_block_taken_for_something_else_is_forgotten():
    pool = BlockPool(1)
    pool.set_hash(pool.allocate(), name(1))
    assert pool.find(name(1)) == 0
    pool.release([0])
    assert pool.find(name(1)) == 0
    pool.allocate()
    assert pool.find(name(1)) is None
    with pytest.raises(OutOfBlocks):
        pool.allocate()


def test_a_found_block_leaves_the_free_list():
    pool = BlockPool(3)
    pool.set_hash(pool.allocate(), name(1))
    pool.release([0])
    pool.incref(0)
    pool.incref(0)
    assert (pool.num_references(0), pool.num_free, list(pool.free_blocks())) == (2, 2, [1, 2])
    pool.release([0])
    assert pool.num_free == 2
    pool.release([0])
    assert list(pool.free_blocks()) == [1, 2, 0]


def test_the_second_block_of_equal_content_stays_unnamed():
    pool = BlockPool(2)
    pool.set_hash(pool.allocate(), name(1))
    pool.set_hash(pool.allocate(), name(1))
    assert (pool.find(name(1)), pool.block_hash(1)) == (0, None)


def test_forgetting_is_rejected_while_a_block_is_in_use():
    pool = BlockPool(2)
    pool.set_hash(pool.allocate(), name(1))
    assert not pool.reset_contents()
    assert pool.find(name(1)) == 0
    pool.release([0])
    assert pool.reset_contents()
    assert pool.cached_blocks() == {}
    assert pool.block_hash(0) is None


def hashes(token_ids: list[int], *keys: ExtraKey) -> list[bytes]:
    """Return the hashes of the blocks of two tokens each."""
    chain = [ROOT_HASH]
    for start in range(0, len(token_ids), 2):
        chain.append(hash_block(chain[-1], array("i", token_ids[start : start + 2]), start, keys))
    return chain[1:]


def test_hashes_depend_on_everything_before_and_on_nothing_else():
    assert hashes([1, 2, 3, 4]) == hashes([1, 2, 3, 4])
    assert hashes([1, 2, 3, 4])[0] == hashes([1, 2])[0]
    first_blocks = [
        hashes([1, 2])[0],
        hashes([2, 1])[0],
        hashes([1, 2, 1, 2])[1],
        *[hashes([1, 2], ExtraKey(0, kind, "x"))[0] for kind in ("salt", "adapter")],
        hashes([1, 2], ExtraKey(0, "salt", ""))[0],
        hashes([1, 2], ExtraKey(1, "salt", "x"))[0],
        hashes([1, 2], ExtraKey(0, "salt", "x"), ExtraKey(0, "adapter", "x"))[0],
    ]
    assert len(set(first_blocks)) == len(first_blocks)


def test_an_extra_key_separates_the_blocks_from_its_position_on():
    """As the digest of an image does: what stands before it is shared."""
    images = [ExtraKey(3, "image", b"c")], [ExtraKey(3, "image", b"d")]
    plain, cat, dog = (hashes([7] * 8, *keys) for keys in ([], *images))
    assert plain[0] == cat[0] == dog[0]
    assert all(len({one, two, three}) == 3 for one, two, three in zip(plain[1:], cat[1:], dog[1:], strict=True))


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


@pytest.mark.parametrize(
    "fields", [{"cache_salt": "b"}, {"cache_salt": None}, {"cache_salt": "a", "adapter": Adapter("x", "d", "/x", 8)}]
)
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


def test_reset_is_rejected_while_in_use():
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
