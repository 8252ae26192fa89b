"""KV cache groups in the core: what requests hold of each, what windows free, and which prefixes are found."""

import random
from types import SimpleNamespace

import pytest
from core_fakes import FakeEngine, alone
from media_settings import media

from octavo.core_proc.cache.groups import NULL_BLOCK, CacheGroups
from octavo.core_proc.cache.pool import BlockPool
from octavo.core_proc.cache.prefix import Hits, PrefixCache
from octavo.protocol.buffers import Buffer
from octavo.protocol.config import CacheGroupSpec
from octavo.protocol.media import MediaItem, MediaTensor, digest_of


def group(kind: str = "full", window: int = 0) -> CacheGroupSpec:
    return CacheGroupSpec(kind=kind, window=window, num_layers=1, block_bytes=1000)


BLOCK = 4
MIXES = {
    "two full": [group(), group()],
    "window": [group("window", 6)],
    "mixed": [group("window", 9), group(), group("window", 9), group("window", 1)],
    "chunks": [group(), group("chunk", 10)],
}
PROMPT = list(range(1, 42))


def run(engine: FakeEngine, request_id: str, prompt: list[int], max_tokens: int = 2, **fields):
    output = engine.submit(request_id, prompt, max_tokens, **fields)
    engine.run()
    return output


@pytest.mark.parametrize("mix", MIXES)
def test_a_request_holds_what_its_windows_read_and_no_more_than_is_planned(mix: str) -> None:
    groups = CacheGroups(MIXES[mix], BLOCK, 16)
    engine = FakeEngine(256, MIXES[mix], max_model_len=128, max_num_batched_tokens=16)
    output = engine.submit("alone", PROMPT, 40)
    most = [0] * groups.num_groups
    while engine.scheduler.has_requests:
        engine.turn()
        for request in engine.scheduler.running:
            held = [sum(block_id != NULL_BLOCK for block_id in ids) for ids in request.block_ids]
            most = list(map(max, most, held))
    engine.run()
    planned = groups.max_blocks_per_group(len(PROMPT) + 40)
    assert all(limit - 1 <= held <= limit for held, limit in zip(most, planned, strict=True))
    assert output.token_ids == alone(PROMPT, 40).token_ids


@pytest.mark.parametrize("mix", MIXES)
def test_the_longest_request_that_is_accepted_runs_alone_in_the_smallest_cache(mix: str) -> None:
    groups = CacheGroups(MIXES[mix], BLOCK, 16)
    num_blocks = groups.max_request_blocks(100)
    engine = FakeEngine(num_blocks, MIXES[mix], max_model_len=100, max_num_batched_tokens=16)
    prompt = [index % 40 for index in range(70)]
    output = engine.submit("alone", prompt, 30)
    engine.run()
    assert output.token_ids == alone(prompt, 30).token_ids
    assert engine.scheduler.counters.num_preemptions == 0
    assert groups.longest_request(num_blocks, 1000) >= 100
    assert groups.longest_request(num_blocks - 1, 1000) < 100 or mix == "window"


def test_an_equal_prompt_is_found_whole_and_needs_the_blocks_of_the_window_alone() -> None:
    engine = FakeEngine(64, MIXES["mixed"], max_num_batched_tokens=16)
    assert run(engine, "first", PROMPT).num_cached_tokens == 0
    output = engine.submit("alone", PROMPT, 2)
    plan = engine.plan()
    (admitted,) = plan.admitted
    assert [[block_id == NULL_BLOCK for block_id in ids].count(True) for ids in admitted.block_ids] == [8, 0, 8, 10]
    engine.run()
    assert output.num_cached_tokens == 40
    assert output.token_ids == alone(PROMPT, 2).token_ids


def test_a_prefix_whose_window_was_evicted_is_found_only_where_another_window_ends() -> None:
    engine = FakeEngine(40, [group(), group("window", 8)], max_model_len=128, max_num_batched_tokens=16)
    common = PROMPT[:24]
    run(engine, "a", common)
    assert run(engine, "b", [*common, 1]).num_cached_tokens == 24
    run(engine, "c", [*common, *PROMPT[:40]])
    assert run(engine, "d", [*common, 2]).num_cached_tokens == 24
    pool, cache = engine.scheduler.cache.pool, engine.scheduler.cache
    hashes = _hashes(engine, common)
    pool.drop_hash(hashes[5] + cache.groups.key_suffixes[1])
    assert run(engine, "e", [*common, 3]).num_cached_tokens == 20
    pool.drop_hash(hashes[2])
    assert run(engine, "f", [*common, 4]).num_cached_tokens == 8


def _hashes(engine: FakeEngine, tokens: list[int]) -> list[bytes]:
    engine.submit("hashes", [*tokens, 1], 1)
    engine.plan()
    hashes = list(engine.scheduler.running.first.block_hashes)
    engine.run()
    return hashes


def test_windows_that_are_freed_while_running_are_reused_before_the_blocks_of_finished_requests() -> None:
    engine = FakeEngine(64, [group(), group("window", 8)], max_model_len=128, max_num_batched_tokens=16)
    engine.submit("a", PROMPT, 2)
    engine.run()
    pool, suffix = engine.scheduler.cache.pool, engine.scheduler.cache.groups.key_suffixes[1]
    hashes = [pool.block_hash(block_id) for block_id in pool.free_blocks()]
    first_kept = min(index for index, name in enumerate(hashes) if name is not None and not name.endswith(suffix))
    freed_early = [name for name in hashes[:first_kept] if name is not None]
    assert len(freed_early) >= 6


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("chunk", [3, 16])
def test_storms_give_every_request_the_tokens_it_gets_alone(mix: str, chunk: int) -> None:
    """Few blocks, common prefixes, aborts: preemptions and hits in all orders. The worker and the invariants check."""
    rng = random.Random(f"{mix} {chunk}")
    num_blocks = CacheGroups(MIXES[mix], BLOCK, chunk).max_request_blocks(64) + 3
    engine = FakeEngine(num_blocks, MIXES[mix], max_model_len=64, max_num_batched_tokens=chunk, max_num_seqs=6)
    stems = [[rng.randrange(50) for _ in range(40)] for _ in range(3)]
    prompts = {}
    for index in range(60):
        stem = rng.choice(stems)[: rng.randrange(1, 40)]
        prompt = [*stem, *[rng.randrange(50) for _ in range(rng.randrange(0, 8))]]
        prompts[str(index)] = prompt, rng.randrange(1, 16)
        engine.submit(str(index), prompt, prompts[str(index)][1])
        for _ in range(rng.randrange(6)):
            if engine.scheduler.has_requests:
                engine.turn()
        if rng.random() < 0.1:
            engine.abort(str(index))
            del prompts[str(index)]
    engine.run()
    # What a window needs is reserved when a request starts, so that only full groups run out of blocks.
    assert engine.scheduler.counters.num_preemptions > 0 or mix == "window"
    assert engine.scheduler.counters.prefix_cache_hits > 0
    for name, (prompt, max_tokens) in prompts.items():
        assert engine.outputs[name].token_ids == alone(prompt, max_tokens).token_ids


def test_a_request_gets_no_more_of_a_step_than_its_windows_are_worth() -> None:
    groups = [group(), group("window", 8)]
    settings = {"max_model_len": 8000, "max_num_batched_tokens": 4096, "block_size": 16}
    engine = FakeEngine(2000, groups, **settings)
    engine.submit("a", [1] * 5000, 1)
    engine.submit("b", [2] * 5000, 1)
    engine.run()
    assert engine.scheduled_tokens()[0] == [2048, 2048]
    engine = FakeEngine(2000, [group(), group("window", 3000)], **settings)
    engine.submit("a", [1] * 5000, 1)
    engine.run()
    assert engine.scheduled_tokens() == [[3000], [2000]]


@pytest.mark.parametrize("limits", [{"max_draft_tokens": 7}, {"max_decode_steps": 8}])
def test_a_limit_of_chunks_is_none_for_decodes(limits: dict[str, int]) -> None:
    windows = [CacheGroups([group("window", 16)], BLOCK, 8, 2, **more).windowed[0] for more in (limits, {})]
    assert [window.max_held for window in windows] == [8, 6]


@pytest.mark.parametrize("num_blocks", range(7, 22))
@pytest.mark.parametrize("num_turns", [0, 2])
def test_requests_that_share_a_window_start_together_only_if_both_fit(num_blocks: int, num_turns: int) -> None:
    """What one passes stays used as long as the other holds it: the second to start needs a window of its own."""
    specs = [group("window", 16)]
    assert CacheGroups(specs, BLOCK, 8).windowed[0].max_held == 7
    engine = FakeEngine(num_blocks, specs, max_model_len=200, max_num_batched_tokens=8)
    prompts = {name: [*PROMPT[:24], *[last] * 60] for name, last in (("a", 7), ("b", 8))}
    engine.submit("a", prompts["a"], 5)
    for _ in range(num_turns):
        engine.turn()
    engine.submit("b", prompts["b"], 5)
    has_shared = False
    while engine.scheduler.has_requests:
        engine.turn()
        pool, running = engine.scheduler.cache.pool, engine.scheduler.running
        held = [block_id for request in running for block_id in request.block_ids[0] if block_id != NULL_BLOCK]
        has_shared |= any(pool.num_references(block_id) > 1 for block_id in held)
    engine.run()
    assert has_shared == (num_blocks > 14), "a window each, and the watermark"
    assert engine.scheduler.counters.num_preemptions == 0
    for name, prompt in prompts.items():
        assert engine.outputs[name].token_ids == alone(prompt, 5).token_ids


@pytest.mark.parametrize("num_blocks", [15, 18, 21, 24])
def test_a_request_that_stalls_with_a_shared_window_goes_on(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others pass the shared blocks and free none: they start only if they have windows of their own."""
    engine = FakeEngine(num_blocks, [group("window", 16)], max_model_len=200, max_num_batched_tokens=8)
    prompts = {name: [*PROMPT[:24], *[index] * 60] for index, name in enumerate("abc")}
    engine.submit("a", prompts["a"], 5)
    while not engine.scheduler.running or engine.scheduler.running.first.num_computed_tokens < 24:
        engine.turn()
    with monkeypatch.context() as patch:
        patch.setattr(
            engine.scheduler.cache, "max_chunk", lambda request, start: 0 if request.request_id == "a" else None
        )
        engine.submit("b", prompts["b"], 5)
        engine.turn()
        engine.submit("c", prompts["c"], 5)
        while len(engine.outputs["b"].token_ids) < 2:
            engine.turn()
        assert engine.scheduler.running.first.num_computed_tokens == 24
    engine.run()
    for name, prompt in prompts.items():
        assert engine.outputs[name].token_ids == alone(prompt, 5).token_ids
    assert engine.scheduler.counters.num_preemptions == 0


@pytest.fixture
def three_kinds() -> PrefixCache:
    """Return an empty cache whose requests hold at most 4 blocks of the first group and 3 of the last one."""
    specs = [group("window", 9), group(), group("chunk", 6)]
    cache = PrefixCache(BlockPool(64), CacheGroups(specs, BLOCK, BLOCK), is_enabled=True)
    assert [windowed.max_held for windowed in cache.groups.windowed] == [4, 3]
    return cache


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "first_blocks", "expected"),
    [
        (1, 0, [], (1, 1, 1)),
        (40, 0, [], (4, 10, 3)),
        (40, 3, [0, 0, 0], (1, 7, 0)),
        (40, 8, [4, 0, 5], (0, 2, 0)),
        (40, 8, [5, 0, 6], (1, 2, 1)),
        (40, 8, [8, 0, 8], (2, 2, 2)),
        (33, 9, [7, 0, 8], (0, 0, 0)),
        (4, 9, [7, 0, 8], (0, 0, 0)),
        (40, 8, [3, 0, 4], (0, 2, 0)),
    ],
    ids=[
        "begins",
        "long",
        "chunk full",
        "both full",
        "one place",
        "held none",
        "enough",
        "shorter",
        "more than planned",
    ],
)
def test_missing_blocks(three_kinds: PrefixCache, num_tokens, num_blocks, first_blocks, expected) -> None:
    request = SimpleNamespace(num_blocks=num_blocks, first_blocks=first_blocks)
    assert three_kinds.num_missing_blocks(request, num_tokens) == sum(expected)


@pytest.mark.parametrize(
    ("num_free", "expected"),
    [([2, 8, 1], (2 + 2, 8 + 5, 1 + 2)), ([0, 0, 0], (4, 5, 3)), ([0, 8, 1], (4, 8 + 5, 1 + 2))],
    ids=["all are free", "another request holds all", "another request holds the window"],
)
def test_hits_that_another_request_holds_save_no_block_of_a_window(
    three_kinds, num_free, expected, monkeypatch
) -> None:
    hits = Hits(8, [[1, 2], [*range(3, 11)], [11]], [6, 0, 7], [])
    monkeypatch.setattr(three_kinds, "count_hits", lambda request: (hits, num_free))
    assert three_kinds.num_blocks_to_start(SimpleNamespace(num_tokens=52)) == sum(expected)


def test_a_chunk_of_one_token_that_belongs_to_an_image_needs_what_its_windows_leave() -> None:
    """It is the last token left to compute, but no decode. The invariants compare the blocks reserved for it."""
    pixels = {"pixels": MediaTensor("uint8", [1], Buffer(b"b"))}
    item = MediaItem([(11, 2)], digest_of(pixels), pixels)
    limits = {"block_size": 2, "long_prefill_token_threshold": 3}
    engine = FakeEngine(
        64,
        [group("window", 50), group(), group("window", 1)],
        media=media(max_num_encoder_tokens=2, encoder_cache_tokens=2, max_item_tokens=2),
        **limits,
    )
    output = engine.submit("image@11b~", [2] * 13, 1, media=[item])  # as simulated workers expect it
    engine.run()
    assert engine.plans[-1].scheduled[0].num_tokens == 1
    assert len(output.token_ids) == 1
