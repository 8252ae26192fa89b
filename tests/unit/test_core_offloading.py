"""Contents of evicted blocks in host memory: what plans copy, and that later prefixes find them."""

import random

import pytest
from core_fakes import CLIENT, FakeEngine, alone

from octavo.core_proc.cache.copy_cost import CopyCost
from octavo.core_proc.cache.host_tier import HostTier
from octavo.core_proc.file_store import MAX_DELAY_STEPS
from octavo.core_proc.file_watch import FileChanges
from octavo.core_proc.request import Request, RequestState
from octavo.core_proc.scheduler.prompt_cost import PromptCost
from octavo.protocol.config import CacheGroupSpec
from octavo.protocol.steps import Scheduled

FULL = CacheGroupSpec(num_layers=1, block_bytes=1000)
WINDOW = CacheGroupSpec(kind="window", window=9, num_layers=1, block_bytes=1000)
STATE = CacheGroupSpec(kind="state", window=16, num_layers=1, block_bytes=1000)
NAMES, VOCAB = "abcd", 30
MIXES = {
    "full": [FULL],
    "full and window": [FULL, WINDOW],
    "windows": [WINDOW, FULL, WINDOW],
    "window": [WINDOW],
    "states": [FULL, STATE],
    "states only": [STATE],
}


def offloading(
    num_blocks: int,
    num_host_blocks: int,
    groups: list[CacheGroupSpec] = MIXES["full"],
    max_copied: int = 0,
    **changes,
):
    """Return an engine whose worker verifies that every block holds what the step reads.

    Args:
        max_copied: the blocks that a step may wait for; 0: any number.
    """
    return FakeEngine(num_blocks, groups, kv_offloading_bytes=1000 * num_host_blocks + max_copied, **changes)


def ask_in_turn(engine: FakeEngine, names: str, num_tokens: int = 30) -> None:
    for name in names:
        engine.submit(f"{name} {len(engine.outputs)}", [NAMES.index(name) + 1] * num_tokens, 1)
        engine.run()


def test_an_evicted_prefix_comes_back() -> None:
    engine = offloading(num_blocks=16, num_host_blocks=20)
    ask_in_turn(engine, "abc", num_tokens=33)
    before = engine.worker.num_computed_tokens
    output = engine.submit("again", [1] * 33)
    engine.run()
    assert output.num_cached_tokens == 32
    assert output.token_ids == alone([1] * 33).token_ids
    assert engine.worker.num_computed_tokens - before == 4
    stats = engine.scheduler.stats()
    assert stats.external_prefix_cache_hits == 4 * engine.worker.num_copied_in > 0
    assert stats.prefix_cache_hits + stats.external_prefix_cache_hits == 32
    assert stats.kv_offload_stored_bytes >= stats.kv_offload_loaded_bytes == 1000 * engine.worker.num_copied_in


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("num_host_blocks", "max_copied"), [(1, 0), (7, 1), (300, 0), (300, 1), (300, 3)])
def test_random_conversations_read_only_what_they_wrote(mix: str, num_host_blocks: int, max_copied: int) -> None:
    rng = random.Random(num_host_blocks)
    path = "/files" if max_copied == 3 else ""
    changes = {"max_num_batched_tokens": 24, "kv_offloading_path": path}
    engine = offloading(len(MIXES[mix]) * 18, num_host_blocks, MIXES[mix], max_copied, **changes)
    turns = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))] for _ in range(8)]
    for number in range(80):
        turn = rng.choice(turns)
        if len(turn) > 40:
            turn.clear()
        turn += [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
        engine.submit(f"request {number}", list(turn), max_tokens=rng.randrange(1, 9))
        for _ in range(rng.randrange(9) if number % 9 else 0):
            if engine.scheduler.has_requests:
                engine.turn()
        if number % 20 == 7:
            engine.abort(f"request {number}")
        if engine.files and rng.random() < 0.2:
            del engine.files[rng.choice(list(engine.files))]
        if number == 50:
            engine.replace_worker()
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.kv_offload_stored_bytes
    assert stats.external_prefix_cache_hits or num_host_blocks < 300


def test_preempted_requests_continue_from_host_memory() -> None:
    engine = offloading(num_blocks=16, num_host_blocks=100)
    outputs = {name: engine.submit(name, [NAMES.index(name) + 1] * 9, max_tokens=40) for name in "abc"}
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.num_preemptions
    assert engine.worker.num_copied_in
    assert stats.num_recomputed_tokens <= engine.config.block_size * stats.num_preemptions
    for name, output in outputs.items():
        assert output.token_ids == alone([NAMES.index(name) + 1] * 9, 40).token_ids


def test_a_request_waits_for_long_copies_and_no_other_does() -> None:
    engine = offloading(num_blocks=40, num_host_blocks=100, max_copied=1, async_scheduling=False)
    ask_in_turn(engine, "abcdabcd", num_tokens=45)
    other = engine.submit("other", [9] * 5, max_tokens=30)
    engine.turn()
    again = engine.submit("again", [1] * 45)
    while not engine.loads:
        engine.turn()
    (swapped,) = engine.scheduler.cache.loads.swapped
    assert swapped.state is RequestState.SWAPPED
    num_tokens = len(other.token_ids)
    for _ in range(6):
        engine.commit()
        assert engine.plan() is not None
    assert len(other.token_ids) >= num_tokens + 5
    assert not again.token_ids
    engine.finish_load()
    assert swapped.state is RequestState.WAITING
    engine.run()
    assert again.num_cached_tokens == 44
    assert again.token_ids == alone([1] * 45).token_ids


@pytest.mark.parametrize("event", ["abort", "loss", "weights"])
def test_a_load_ends_after_its_request_or_its_weights(event: str) -> None:
    engine = offloading(num_blocks=40, num_host_blocks=100, max_copied=1, async_scheduling=False)
    ask_in_turn(engine, "abcdabcd", num_tokens=45)
    engine.submit("other", [9] * 5, max_tokens=30)
    engine.turn()
    engine.submit("again", [1] * 45)
    while not engine.loads:
        engine.turn()
    match event:
        case "abort":
            engine.abort("again")
        case "loss":
            engine.replace_worker()
        case "weights":
            while engine.scheduler.in_flight:
                engine.commit()
            engine.scheduler.set_weights(1, recomputes=False)
            engine.finish_load()
    engine.run()
    if event != "abort":
        assert engine.outputs["again"].token_ids == alone([1] * 45).token_ids
        assert engine.outputs["again"].num_cached_tokens == 0


def with_files(num_blocks: int = 16, num_host_blocks: int = 0, mix: str = "full", **changes) -> FakeEngine:
    return offloading(num_blocks, num_host_blocks, MIXES[mix], kv_offloading_path="/files", **changes)


@pytest.mark.parametrize("mix", ["full", "states", "states only"])
@pytest.mark.parametrize("num_host_blocks", [0, 3, 100])
def test_other_workers_find_files(num_host_blocks: int, mix: str) -> None:
    engine = with_files(num_host_blocks=num_host_blocks, mix=mix)
    ask_in_turn(engine, "abc", num_tokens=33)
    engine.replace_worker()
    before = engine.worker.num_computed_tokens
    output = engine.submit("again", [1] * 33)
    engine.run()
    assert output.num_cached_tokens == 32
    assert output.token_ids == alone([1] * 33).token_ids
    assert engine.worker.num_computed_tokens - before == 4
    assert engine.scheduler.stats().external_prefix_cache_hits >= 32


def test_a_request_is_computed_whose_files_have_vanished() -> None:
    engine = with_files()
    ask_in_turn(engine, "abc", num_tokens=33)
    engine.replace_worker()
    for key in list(engine.files)[3:]:
        del engine.files[key]
    output = engine.submit("again", [1] * 33)
    engine.run()
    assert output.token_ids == alone([1] * 33).token_ids
    assert output.num_cached_tokens <= 12
    assert len(engine.files) >= 8  # they were written again


@pytest.mark.parametrize("num_outputs", [4, 100])
def test_contents_wait_for_others_with_which_they_are_written(num_outputs: int) -> None:
    engine = with_files(num_blocks=600, max_model_len=200)
    stores = list[int]()
    load_blocks = engine.load_blocks
    engine.load_blocks = lambda make, on_done: (stores.append(len(make(0).blocks)), load_blocks(make, on_done))
    engine.submit("a", [1] * 33, max_tokens=num_outputs)
    engine.run()
    assert sum(stores) == len(engine.files) == (33 + num_outputs - 1) // 4
    assert len(stores) <= 1 + len(engine.plans) // MAX_DELAY_STEPS


def test_files_of_other_engines_are_found() -> None:
    engine, other = with_files(), with_files()
    ask_in_turn(other, "a", num_tokens=33)
    engine.files.update(other.files)
    engine.watch.changes.append(FileChanges(list(other.files), []))
    ask_in_turn(engine, "b")
    output = engine.submit("again", [1] * 33)
    engine.run()
    assert output.num_cached_tokens == 32


def test_more_of_a_request_is_found_between_its_load_and_its_start() -> None:
    other = with_files()
    ask_in_turn(other, "a", num_tokens=33)
    engine = with_files(num_blocks=40, max_num_seqs=1, async_scheduling=False)
    engine.files.update(other.files)
    first, later = list(other.files)[:4], list(other.files)[4:]
    engine.scheduler.change_files(first, ())
    again = engine.submit("again", [1] * 33)
    assert engine.plan() is None and engine.loads
    engine.submit("between", [9] * 5, max_tokens=3)
    engine.plan()  # takes the only slot
    engine.finish_load()
    engine.scheduler.change_files(later, ())
    engine.run()
    assert again.num_cached_tokens == 32
    assert engine.scheduler.cache.pool.num_free == 40, "the first load has given up its blocks"


def test_files_are_not_for_other_weights() -> None:
    engine = with_files()
    ask_in_turn(engine, "ab", num_tokens=33)
    assert engine.scheduler.cache.files is not None
    assert engine.scheduler.cache.files.num_storing == 0
    engine.scheduler.set_weights(1, recomputes=False)
    num_files = len(engine.files)
    ask_in_turn(engine, "abc", num_tokens=33)
    assert engine.scheduler.stats().external_prefix_cache_hits == 0
    assert len(engine.files) == num_files


def test_contents_with_nan_leave_no_files() -> None:
    engine = with_files(async_scheduling=False)
    engine.submit("nan", [1] * 33)
    engine.plan()
    request = engine.scheduler.requests[CLIENT, "nan"]
    assert isinstance(request, Request)
    while engine.scheduler.in_flight:
        engine.commit()
    engine.scheduler.cache.invalidate_blocks(request)
    engine.abort("nan")
    engine.run()
    engine.plan()
    assert not engine.files
    assert engine.scheduler.cache.files is not None
    assert len(engine.scheduler.cache.files) == 0


def test_lost_workers_lose_host_memory() -> None:
    engine = offloading(num_blocks=16, num_host_blocks=100)
    ask_in_turn(engine, "abcd")
    engine.submit("again", [1] * 30)
    engine.plan()
    engine.replace_worker()
    assert engine.scheduler.cache.host is not None
    assert len(engine.scheduler.cache.host) == 0
    engine.run()
    assert engine.outputs["again"].token_ids == alone([1] * 30).token_ids


def test_contents_are_dropped_with_the_cache() -> None:
    engine = offloading(num_blocks=16, num_host_blocks=100)
    ask_in_turn(engine, "abcd")
    assert engine.scheduler.reset_prefix_cache()
    ask_in_turn(engine, "a")
    assert engine.scheduler.stats().external_prefix_cache_hits == 0


def test_nothing_computed_with_old_weights_is_found() -> None:
    engine = offloading(num_blocks=16, num_host_blocks=100)
    ask_in_turn(engine, "abcd")
    engine.scheduler.set_weights(1, recomputes=False)
    ask_in_turn(engine, "a")
    assert engine.scheduler.stats().external_prefix_cache_hits == 0


class TestHostTier:
    def test_the_least_recently_used_content_makes_place(self) -> None:
        host = HostTier(2)
        for block_id, key in enumerate((b"a", b"b")):
            host.on_evicted(block_id, key)
        assert host.take_copies() == ([(0, 0), (1, 1)], [])
        host.on_evicted(2, b"a")  # it is there, and so used now
        host.on_evicted(3, b"c")
        assert host.take_copies() == ([(3, 1)], [])
        assert (b"a" in host, b"b" in host, b"c" in host) == (True, False, True)

    def test_what_a_plan_copies_in_is_not_overwritten_by_it(self) -> None:
        host = HostTier(1)
        host.on_evicted(0, b"a")
        host.take_copies()
        host.pin([b"a"])
        host.on_evicted(5, b"b")
        host.copy_in(b"a", 5)
        assert host.take_copies() == ([], [(0, 5)])
        assert b"b" not in host

    def test_a_dropped_content_keeps_its_place_until_it_is_copied(self) -> None:
        host = HostTier(1)
        host.on_evicted(0, b"a")
        host.drop(b"a")
        host.on_evicted(1, b"b")
        assert not host.check(())
        assert host.take_copies() == ([(0, 0)], [])
        host.on_evicted(1, b"b")
        assert host.take_copies() == ([(1, 0)], [])


def known_cost(token_s: float, key_s: float, host_block_s: float = 1.0) -> CopyCost:
    cost = CopyCost(host_block_s, block_size=4)
    cost.observe_step(token_s, key_s)
    return cost


@pytest.mark.parametrize(
    ("token_s", "key_s", "num_host", "end"),
    [
        (1.0, 0.0, [1, 1, 1], 3),  # a block costs 1 s to copy, and 4 s to compute
        (0.2, 0.0, [1, 1, 1], 0),
        (0.2, 0.0, [0, 1, 1], 1),  # what is on the device costs nothing
        (0.2, 0.0, [1, 0, 0], 3),  # and makes a copy before it worth it
        (0.2, 0.02, [1, 1, 1, 1], 4),  # attention to earlier tokens makes later blocks dearer
        (0.2, 0.0, [1, 1, 0, 1, 0, 0, 0, 1], 7),  # a run at a time
    ],
)
def test_copies_end_where_computing_is_faster(token_s: float, key_s: float, num_host: list[int], end: int) -> None:
    cost = known_cost(token_s, key_s)
    assert cost.is_known
    assert cost.best_end(0, num_host, [0] * len(num_host)) == end


def test_slow_files_are_computed_for_a_while() -> None:
    cost = known_cost(token_s=1.0, key_s=0.0)
    assert cost.best_end(0, [0], [1]) == 1
    cost.has_changed = False
    cost.observe_load(num_host_blocks=1, num_file_blocks=2, elapsed_s=101.0)
    assert cost.has_changed
    assert cost.best_end(0, [0], [1]) == 0
    assert cost.best_end(0, [1], [0]) == 1
    for _ in range(1000):
        cost.observe_step(1.0, 0.0)
    assert cost.best_end(0, [0], [1]) == 1


def noisy_changes(cost: CopyCost) -> int:
    """Count how often hits are looked up again, while 1000 steps take 5 % more or less than they should."""
    rng, prompt_cost, num_changes = random.Random(0), PromptCost(), 0
    for step in range(1000):
        start = rng.choice([0, 64, 128])
        scheduled = [Scheduled(0, start, 64, 0)]
        prompt_cost.observe(scheduled, 64 * 1e-3 * rng.gauss(1.0, 0.05))
        cost.observe_step(prompt_cost.token_s, prompt_cost.key_s)
        num_changes += step > 10 and cost.has_changed
        cost.has_changed = False
    return num_changes


def test_noise_changes_no_decision() -> None:
    assert noisy_changes(CopyCost(1e-4, block_size=16)) <= 20
    assert noisy_changes(CopyCost(0.0, block_size=16)) == 0, "nothing is offloaded"


def test_a_price_that_changes_slowly_is_used() -> None:
    cost = known_cost(token_s=1.0, key_s=0.0)
    for step in range(1, 101):
        cost.observe_step(1.0 - 0.008 * step, 0.0)
    assert cost.best_end(0, [1], [0]) == 0, "a block costs 1 s to copy, and 0.8 s to compute"


def test_nothing_is_computed_instead_until_a_step_was_measured() -> None:
    assert not CopyCost(1.0, block_size=4).is_known
    assert not known_cost(1.0, 0.0, host_block_s=0.0).is_known


@pytest.mark.parametrize("path", ["", "/files"])
@pytest.mark.parametrize("mix", ["full", "full and window", "windows"])
def test_a_prefix_is_computed_that_copies_would_delay(mix: str, path: str) -> None:
    """Computed or copied, the result is the same."""
    engine = offloading(len(MIXES[mix]) * 18, 300, MIXES[mix], kv_offloading_path=path, host_block_s=1e-3)
    cost = engine.scheduler.cache.copy_cost
    ask_in_turn(engine, "abc", num_tokens=33)
    cost.observe_step(1e-6, 0.0)
    dear = engine.submit("dear", [1] * 33)
    engine.run()
    assert dear.num_cached_tokens < 32
    ask_in_turn(engine, "bcd", num_tokens=33)
    cost.observe_step(1.0, 0.0)
    cheap = engine.submit("cheap", [1] * 33)
    engine.run()
    assert cheap.num_cached_tokens == 32
    assert dear.token_ids == cheap.token_ids == alone([1] * 33).token_ids
