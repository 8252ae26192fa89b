"""Which engine gets a prompt: by what each has cached, and by how busy it is."""

import random
from collections.abc import ItemsView

from octavo.frontend.routing.cache_view import MIN_COMPACTED, SpanMap
from octavo.frontend.routing.router import ESTIMATE_S, LIVE_COST_TOKENS, MAX_ADAPTERS, PENDING_DIVISOR, PrefixRouter
from octavo.protocol.buffers import Buffer
from octavo.protocol.events import CacheUpdate
from octavo.protocol.ids import IdArray, pack_ids
from octavo.protocol.prefix_hash import ROOT_HASH, SHORT_HASH_BYTES, SPAN_TOKENS, ExtraKey, hash_block, short_state_hash

BLOCK_SIZE = 16
SALT = (ExtraKey(0, "salt", "x"),)
IDLE = dict.fromkeys(range(8), (0, 0))


def prompt(num_blocks: int, seed: int = 0, extra: int = 3) -> IdArray:
    rng = random.Random(seed)
    return pack_ids([rng.randrange(1000) for _ in range(num_blocks * SPAN_TOKENS + extra)])


def router(num_engines: int = 3, max_spans: int = 1000) -> PrefixRouter:
    return PrefixRouter(num_engines, max_spans, BLOCK_SIZE)


Loads = dict[int, tuple[int, int]]


def choose(
    routes: PrefixRouter,
    token_ids: IdArray,
    extra_keys: tuple[ExtraKey, ...],
    candidates: list[int],
    loads: Loads = IDLE,
) -> tuple[int, int]:
    for engine in candidates:
        routes.set_load(engine, *loads[engine])
    return routes.choose(token_ids, extra_keys, tuple(candidates))


def test_idle_engines_take_turns() -> None:
    routes = router()
    chosen = [choose(routes, prompt(2, seed), (), [0, 1, 2])[0] for seed in range(6)]
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_a_prompt_goes_where_its_prefix_is() -> None:
    routes = router()
    first, num_new = choose(routes, prompt(4), (), [0, 1, 2])
    assert num_new == 4 * SPAN_TOKENS + 3
    longer = prompt(4, extra=0) + prompt(1, seed=9)
    assert choose(routes, longer, (), [0, 1, 2]) == (first, SPAN_TOKENS + 3)
    assert choose(routes, prompt(4), SALT, [0, 1, 2])[1] == len(prompt(4)), "salts share nothing"
    assert choose(routes, prompt(4), (), [1, 2])[0] != first, "an engine that is down gets nothing"


def test_load_outweighs_a_short_prefix() -> None:
    routes = router()
    first, _ = choose(routes, prompt(2), (), [0, 1, 2])
    busy = {**IDLE, first: (PENDING_DIVISOR * (2 * SPAN_TOKENS + 1), 0)}
    assert choose(routes, prompt(2), (), [0, 1, 2], busy)[0] != first
    routes = router()
    first, _ = choose(routes, prompt(2), (), [0, 1, 2])
    busy = {**IDLE, first: (0, 1 + 2 * SPAN_TOKENS // LIVE_COST_TOKENS)}
    assert choose(routes, prompt(2), (), [0, 1, 2], busy)[0] != first


def test_the_view_is_bounded_and_forgets_the_oldest() -> None:
    routes = router(max_spans=6)
    old, _ = choose(routes, prompt(3, seed=1), (), [0, 1, 2])
    choose(routes, prompt(3, seed=2), (), [0, 1, 2])
    assert choose(routes, prompt(3, seed=1), (), [old])[1] == 3, "still there, and the latest now"
    choose(routes, prompt(3, seed=3), (), [0, 1, 2])
    choose(routes, prompt(3, seed=1), (), [old])
    choose(routes, prompt(3, seed=4), (), [0, 1, 2])
    assert choose(routes, prompt(3, seed=1), (), [old])[1] == 3
    assert choose(routes, prompt(3, seed=2), (), [0, 1, 2])[1] == 3 * SPAN_TOKENS + 3
    assert len(routes._sent.engines_of) + len(routes._sent_before.engines_of) <= 2 * 6


def test_a_restarted_engine_has_an_empty_cache() -> None:
    routes = router()
    first, _ = choose(routes, prompt(2), (), [0, 1, 2])
    routes.forget(first)
    assert choose(routes, prompt(2), (), [first])[1] == 2 * SPAN_TOKENS + 3


def stored(token_ids: IdArray, sequence: int = 0, extra_keys: tuple[ExtraKey, ...] = ()) -> CacheUpdate:
    """Return the report of an engine that has computed these tokens."""
    ends, block_hash, size = [], ROOT_HASH, BLOCK_SIZE
    for start in range(0, len(token_ids) - size + 1, size):
        block_hash = hash_block(block_hash, token_ids[start : start + size], start, extra_keys)
        if (start + size) % SPAN_TOKENS == 0:
            ends.append(block_hash[:SHORT_HASH_BYTES])
    return CacheUpdate(1, 1, sequence, sequence == 0, 0, Buffer(b"".join(ends)), Buffer(b""))


def test_what_an_engine_reports_is_known_to_every_process() -> None:
    """Its hashes are those of the core: `hash_block` over blocks, salt included."""
    routes = router()
    salted = prompt(3, seed=5)
    assert routes.view.apply(0, stored(prompt(3, seed=1)))
    assert routes.view.apply(1, stored(prompt(2)))
    assert routes.view.apply(2, stored(prompt(4)))
    assert routes.view.apply(2, stored(salted, 1, SALT))
    assert choose(routes, prompt(4), (), [0, 1, 2]) == (2, 3)
    assert choose(routes, prompt(4), (), [0, 1]) == (1, 2 * SPAN_TOKENS + 3)
    assert choose(routes, salted, SALT, [0, 1, 2]) == (2, 3)
    assert choose(routes, salted, (), [2])[1] == len(salted)


def with_states(token_ids: IdArray, spans: list[int], interval: int = 4 * SPAN_TOKENS) -> CacheUpdate:
    """Return the first report of an engine that has computed these tokens, and has states after so many spans."""
    ends = stored(token_ids).stored.data
    size = SHORT_HASH_BYTES
    states = [short_state_hash(bytes(ends[(span - 1) * size : span * size])) for span in spans]
    return CacheUpdate(1, 1, 0, True, 0, Buffer(bytes(ends) + b"".join(states)), Buffer(b""), interval)


def test_a_prefix_counts_up_to_the_last_state_in_it() -> None:
    routes = router()
    routes.view.apply(0, with_states(prompt(9), [4, 9]))
    routes.view.apply(1, with_states(prompt(8), [6]))
    routes.view.apply(2, with_states(prompt(9), []))
    assert choose(routes, prompt(8), (), [0, 1, 2]) == (1, 2 * SPAN_TOKENS + 3), "0 has more blocks, and continues at 4"
    assert choose(routes, prompt(9), (), [0, 2]) == (0, 3)
    assert choose(routes, prompt(9, extra=4), (), [2])[1] == 9 * SPAN_TOKENS + 4, "without a state all is computed"


def test_a_prompt_that_was_sent_leaves_states_at_intervals_and_at_its_end() -> None:
    routes = router()
    for engine in range(3):
        routes.view.apply(engine, with_states(prompt(1, seed=8), []))
    sent, _ = choose(routes, prompt(10), (), [0, 1, 2])
    longer = prompt(10, extra=0) + prompt(2, seed=1)
    assert choose(routes, longer, (), [0, 1, 2]) == (sent, 2 * SPAN_TOKENS + 3)
    branch = prompt(10, extra=0)[: 9 * SPAN_TOKENS] + prompt(2, seed=2)
    assert choose(routes, branch, (), [sent])[1] == 3 * SPAN_TOKENS + 3, "8 of 9 spans: the last multiple of 4"


def test_what_was_sent_to_an_engine_that_reports_counts_for_a_while() -> None:
    now = [0.0]
    routes = PrefixRouter(2, 1000, BLOCK_SIZE, lambda: now[0])
    for engine in (0, 1):
        routes.view.apply(engine, stored(prompt(1, seed=8)))
    chosen, _ = choose(routes, prompt(2), (), [0, 1])
    assert choose(routes, prompt(2), (), [0, 1]) == (chosen, 3)
    for seconds in (1.5 * ESTIMATE_S, 3 * ESTIMATE_S):
        now[0] = seconds
        choose(routes, prompt(1, seed=9), (), [0, 1])
    assert choose(routes, prompt(2), (), [0, 1])[1] == 2 * SPAN_TOKENS + 3, "no report came: it is not cached"


def test_what_is_evicted_is_forgotten() -> None:
    routes = router()
    report = stored(prompt(2))
    routes.view.apply(1, report)
    routes.view.apply(2, report)
    routes.view.apply(1, CacheUpdate(1, 1, 1, False, 0, Buffer(b""), report.stored))
    assert choose(routes, prompt(2), (), [0, 1, 2])[0] == 2
    routes.forget(2)
    assert routes.view.engines_of == {} and not routes.view.reporting & 1 << 2


def test_after_a_lost_report_the_engine_begins_again() -> None:
    routes = router()
    assert routes.view.apply(1, stored(prompt(2)))
    assert not routes.view.apply(1, stored(prompt(3), 2)), "1 is missing"
    assert not routes.view.reporting and not routes.view.engines_of
    assert not routes.view.apply(1, stored(prompt(3), 3))
    assert routes.view.apply(1, stored(prompt(3), 0))
    assert choose(routes, prompt(3), (), [0, 1, 2]) == (1, 3)


class CountingDict(dict[int, int]):
    """Counts how often it is read."""

    num_reads = 0

    def get(self, key: int, default: int = 0) -> int:  # type: ignore[override]
        self.num_reads += 1
        return super().get(key, default)

    def items(self) -> ItemsView[int, int]:
        self.num_reads += len(self)
        return super().items()


def test_forgetting_an_engine_takes_no_look_at_the_spans_of_others() -> None:
    """The event loop stands still meanwhile, and other engines have a million spans."""
    spans = SpanMap()
    spans.engines_of = counting = CountingDict()
    spans.add(range(1_000), 0)
    spans.add(range(990, 1_020), 1)
    counting.num_reads = 0
    spans.forget(1)
    assert counting.num_reads <= 30
    assert counting == dict.fromkeys(range(1_000), 1)


def test_the_log_of_an_engine_is_as_long_as_its_cache() -> None:
    spans = SpanMap()
    for start in range(0, 20 * MIN_COMPACTED, 100):
        spans.add(range(start, start + 100), 3)
        spans.discard(range(start - 200, start - 100), 3)
    assert len(spans.engines_of) == 200 and len(spans._logs[3]) <= MIN_COMPACTED
    spans.forget(3)
    assert spans.engines_of == {}


def test_an_adapter_stays_where_it_is_until_others_have_clearly_less_to_do() -> None:
    routes, keys = router(), (ExtraKey(0, "adapter", "sql"),)
    home, _ = choose(routes, prompt(2), keys, [0, 1, 2])
    busy = {**IDLE, home: (0, 1)}
    assert all(choose(routes, prompt(2, seed), keys, [0, 1, 2], busy)[0] == home for seed in range(1, 5))
    assert choose(routes, prompt(2, seed=5), (), [0, 1, 2], busy)[0] != home, "the model alone goes anywhere"
    second, _ = choose(routes, prompt(2, seed=6), keys, [0, 1, 2], {**IDLE, home: (0, 3)})
    assert second != home
    found = {choose(routes, prompt(2, seed), keys, [0, 1, 2])[0] for seed in range(7, 13)}
    assert found == {home, second}, "both have it now"
    routes.forget(home)
    routes.forget(second)
    found = {choose(routes, prompt(2, seed), (ExtraKey(0, "adapter", str(seed)),), [0, 1, 2])[0] for seed in range(6)}
    assert found == {0, 1, 2}, "new adapters take turns"


def test_adapters_that_were_not_used_for_long_are_forgotten() -> None:
    routes = router()
    for number in range(2 * MAX_ADAPTERS + 1):
        choose(routes, prompt(0), (ExtraKey(0, "adapter", str(number)),), [0, 1])
    assert len(routes._with_adapter) + len(routes._with_adapter_before) <= 2 * MAX_ADAPTERS
