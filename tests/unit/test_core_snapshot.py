"""The snapshot of a scheduler with a known state."""

from core_fakes import FakeEngine

from octavo.core_proc.snapshot import take_snapshot
from octavo.protocol.snapshot import BLOCK_CACHED, BLOCK_FREE, BLOCK_SHARED, BLOCK_USED, MAX_REQUESTS


def test_an_engine_that_never_ran_shows_free_blocks_alone():
    engine = FakeEngine(num_blocks=12)
    snapshot = take_snapshot(engine.scheduler, engine.scheduler.stats(), now=5.0)
    assert snapshot.blocks == bytes([BLOCK_FREE]) * 12
    assert not snapshot.requests and not snapshot.steps


def test_blocks_are_told_apart_by_who_holds_them():
    engine = FakeEngine(num_blocks=64, async_scheduling=False)
    block = engine.scheduler.cache.block_size
    common = list(range(1, 2 * block + 1))
    engine.submit("first", [*common, 1, 2], max_tokens=8)
    engine.turn()
    engine.turn()
    engine.submit("second", [*common, 3, 4], max_tokens=8)
    engine.turn()
    engine.turn()
    shown = take_snapshot(engine.scheduler, engine.scheduler.stats(), now=0.0)
    held = [list(request.block_ids[0]) for request in engine.scheduler.running]
    shared = set(held[0]) & set(held[1])
    assert len(shared) == 2
    own = (set(held[0]) | set(held[1])) - shared
    for block_id, state in enumerate(shown.blocks):
        assert state == (BLOCK_SHARED if block_id in shared else BLOCK_USED if block_id in own else BLOCK_FREE)
    engine.run()
    after = take_snapshot(engine.scheduler, engine.scheduler.stats(), now=0.0).blocks
    assert after.count(BLOCK_USED) == after.count(BLOCK_SHARED) == 0
    assert after.count(BLOCK_CACHED) >= 2


def test_progress_counts_what_is_computed_and_what_waits():
    engine = FakeEngine(max_num_seqs=1, max_num_batched_tokens=8, async_scheduling=False)
    engine.submit("long", list(range(1, 21)), max_tokens=4)
    engine.submit("later", [1, 2, 3], max_tokens=2)
    engine.turn()
    engine.turn()
    long, later = take_snapshot(engine.scheduler, engine.scheduler.stats(), now=0.0).requests
    assert (long.request_id, long.is_running, long.num_prompt_tokens, long.max_tokens) == ("long", True, 20, 4)
    assert long.num_computed_tokens in (8, 16)
    assert (later.request_id, later.is_running, later.num_computed_tokens) == ("later", False, 0)


def test_steps_say_how_many_tokens_were_prompt_and_how_many_were_decoded():
    engine = FakeEngine(max_num_batched_tokens=8, async_scheduling=False)
    engine.submit("a", list(range(1, 13)), max_tokens=3)
    engine.run()
    steps = take_snapshot(engine.scheduler, engine.scheduler.stats(), now=0.0).steps
    assert [(step.num_prefill_tokens, step.num_decode_tokens) for step in steps] == [(8, 0), (4, 0), (0, 1), (0, 1)]
    assert [step.sequence for step in steps] == sorted(step.sequence for step in steps)


def test_a_crowd_is_cut_to_the_first_in_order():
    engine = FakeEngine(max_num_seqs=4)
    for index in range(MAX_REQUESTS + 10):
        engine.submit(str(index), [1, 2, 3], max_tokens=2)
    engine.turn()
    requests = take_snapshot(engine.scheduler, engine.scheduler.stats(), now=0.0).requests
    assert len(requests) == MAX_REQUESTS
    assert [request.is_running for request in requests[:5]] == [True, True, True, True, False]
