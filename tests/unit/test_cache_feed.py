"""What frontends know of an engine's prefix cache: the truth, a little later, whatever happens on the way."""

from collections import Counter
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from core_fakes import FakeEngine
from hypothesis import given, settings
from service_fakes import FakeRouter
from simulation.worker import ONE_GROUP, SimulatedWorker

from octavo.core_proc.cache_feed import INTERVAL_S, MAX_CONTENTS, RETRY_S, CacheFeed
from octavo.core_proc.outbox import Outbox
from octavo.core_proc.request import Request
from octavo.frontend.routing.cache_view import CacheView
from octavo.protocol.config import CacheGroupSpec
from octavo.protocol.events import CacheUpdate
from octavo.protocol.prefix_hash import SHORT_HASH_BYTES

BLOCK_SIZE = 32
"""Two blocks are a span."""
NUM_BLOCKS = 12
STATES_ONLY = [CacheGroupSpec(kind="state", window=2 * BLOCK_SIZE, num_layers=1, block_bytes=1000)]
HYBRID = [*ONE_GROUP, *STATES_ONLY]


def short(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:SHORT_HASH_BYTES], "little", signed=True)


class Positions:
    """Where in its sequence each block is."""

    def __init__(self) -> None:
        self.index_of: dict[bytes, int] = {}
        self.before: dict[bytes, list[bytes]] = {}
        """The ends of spans before each state."""

    def on_stored(self, request: Request, index: int, group: int) -> None:
        self.index_of[request.block_hashes[index]] = index

    def on_state_stored(self, request: Request, num_blocks: int, slot: int, *, is_computed: bool) -> None:
        self.before[request.block_hashes[num_blocks - 1]] = list(request.block_hashes[1:num_blocks:2])

    def on_removed(self, block_hash: bytes) -> None:
        """Positions of blocks that are gone do no harm."""

    def on_cleared(self) -> None:
        """The same."""


class Watched:
    """An engine whose cache some frontends watch, each with its own view."""

    def __init__(
        self, num_blocks: int = NUM_BLOCKS, num_clients: int = 2, groups: Sequence[CacheGroupSpec] = ONE_GROUP
    ) -> None:
        self.groups = groups
        self.engine = FakeEngine(
            num_blocks, groups, block_size=BLOCK_SIZE, max_model_len=256, max_num_batched_tokens=128, max_num_seqs=2
        )
        self.cache, self.positions, self.now = self.engine.scheduler.cache, Positions(), 0.0
        self.cache.add_observer(self.positions)
        if self.cache.states is not None:
            self.cache.states.add_observer(self.positions)
        self.routers = {bytes([client]): FakeRouter() for client in range(num_clients)}
        self.views = {client: CacheView() for client in self.routers}
        self.resyncs: Counter[bytes] = Counter()
        self.numbers: Counter[bytes] = Counter()
        self.outbox = Outbox(self, 1, lambda: self.now)
        self.num_live = 0
        self.feed = CacheFeed(self.cache, self.outbox, lambda: self.num_live, lambda: self.now)
        for client in self.routers:
            self.outbox.connect(client)
            self.watch(client)

    def watch(self, client: bytes) -> None:
        """Begin a watch, as links do."""
        self.views[client].forget(0)
        self.numbers[client] += 1
        self.feed.watch(client, self.numbers[client])

    def turns(self, number: int) -> None:
        for _ in range(number):
            if self.engine.scheduler.has_requests:
                self.engine.turn()

    def pause(self, num_turns: int) -> None:
        """Let nobody watch during so many turns."""
        for client in self.routers:
            self.feed.watch(client, 0)
        self.turns(num_turns)
        for client in self.routers:
            self.watch(client)

    def send(self, client: bytes, update: CacheUpdate) -> bool:
        return self.routers[client].send(client, update)

    def flush(self, lost: frozenset[bytes] = frozenset()) -> None:
        """Send what is due, and let every view take it; updates for those in `lost` are lost on the way."""
        self.now += INTERVAL_S
        self.feed.flush()
        for client, router in self.routers.items():
            updates, router.sent = router.sent, []
            for update in updates:
                if client in lost or update.watch != self.numbers[client]:
                    continue
                if not self.views[client].apply(0, update):
                    self.resyncs[client] += 1
                    self.watch(client)

    def settle(self) -> None:
        """Let everybody read until nothing is left to send."""
        for router in self.routers.values():
            router.is_peer_slow = False
        self.now += RETRY_S
        for _ in range(4):
            self.num_live += 1  # news, so that a lost last update is noticed
            self.flush()
        while self.feed.timeout_s is not None:
            self.flush()

    def check(self) -> None:
        """Every view holds all ends of spans that are cached or lead to a state, all states, and nothing else."""
        cached, marks = self.cache.pool.cached_hashes(), set[int]()
        if self.cache.states is not None:
            before = [self.positions.before[key[:32]] for key in self.cache.states.pool.cached_hashes()]
            marks = {~short(ends[-1]) for ends in before if ends}
            if not self.cache.num_groups:
                cached = list({end for ends in before for end in ends})
                self.positions.index_of = dict.fromkeys(cached, 1)
        ends = {short(one) for one in cached if (self.positions.index_of[one] + 1) % 2 == 0}
        for view in self.views.values():
            assert ends | marks <= view.engines_of.keys() <= {short(one) for one in cached} | marks
            assert set(view.engines_of.values()) <= {1} and view.reporting == 1
            assert view.state_interval == (2 * BLOCK_SIZE if self.cache.states is not None else 0)


CLIENTS = st.frozensets(st.sampled_from([b"\0", b"\1"]))
OPERATIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 3), st.integers(1, 200)),
    st.tuples(st.just("turns"), st.integers(1, 6)),
    st.tuples(st.just("turns"), st.integers(1, 20)),
    st.tuples(st.just("abort"), st.integers(0, 3)),
    st.tuples(st.just("flush"), CLIENTS),
    st.tuples(st.just("slow"), CLIENTS),
    st.just(("reset",)),
    st.just(("lose",)),
    st.just(("watch",)),
    st.tuples(st.just("pause"), st.integers(0, 20)),
)


def perform(watched: Watched, names: list[str], operation: str, *args) -> None:
    engine = watched.engine
    if operation == "submit":
        family, length = args
        names.append(f"r{len(names)}")
        engine.submit(names[-1], [family] * length, 40)
    elif operation == "turns":
        watched.turns(*args)
    elif operation == "abort" and names:
        engine.abort(names[-1 - args[0] % len(names)])
    elif operation == "flush":
        watched.flush(lost=args[0])
    elif operation == "slow":
        for client, router in watched.routers.items():
            router.is_peer_slow = client in args[0]
    elif operation == "reset":
        engine.scheduler.reset_prefix_cache()
    elif operation == "lose" and engine.scheduler.has_requests:
        engine.scheduler.lose_workers()
        engine.worker = SimulatedWorker(engine.config, NUM_BLOCKS, watched.groups)
        engine.worker.next_sequence = engine.plans[-1].sequence + 1 if engine.plans else 0
        engine._results.clear()
    elif operation == "watch":
        watched.watch(b"\0")
    elif operation == "pause":
        watched.pause(*args)


@pytest.mark.parametrize("groups", [ONE_GROUP, STATES_ONLY, HYBRID], ids=["blocks", "states", "both"])
@settings(max_examples=100, deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=40))
def test_views_equal_the_cache_after_any_operations(groups: Sequence[CacheGroupSpec], operations: list[tuple]) -> None:
    watched, names = Watched(groups=groups), []
    for operation in operations:
        perform(watched, names, *operation)
    watched.settle()
    watched.check()


def test_a_state_counts_as_all_blocks_before_it() -> None:
    watched = Watched(num_clients=1, groups=STATES_ONLY)
    watched.engine.submit("r", [1] * 140, 1)
    watched.engine.run()
    watched.settle()
    watched.check()
    assert len(watched.views[b"\0"].engines_of) == 4, "two spans before the last of two checkpoints"


def test_a_frontend_that_watches_anew_learns_of_states_that_were_there() -> None:
    watched = Watched(num_clients=1, groups=STATES_ONLY)
    watched.engine.submit("a", [1] * 140, 1)
    watched.engine.run()
    watched.settle()
    watched.feed.watch(b"\0", 0)
    watched.engine.submit("b", [2] * 140, 1)
    watched.engine.run()
    watched.watch(b"\0")
    watched.settle()
    watched.check()
    assert len(watched.views[b"\0"].engines_of) == 8


def test_a_state_adds_only_the_spans_that_no_other_state_follows() -> None:
    watched = Watched(num_clients=1, groups=STATES_ONLY)
    watched.flush()
    for number, length in enumerate([64, 128, 192]):
        watched.engine.submit(f"r{number}", [1] * length, 1)
        watched.engine.run()
        stored, removed = watched.feed._changes.take()
        assert (len(stored), len(removed)) == (2 * SHORT_HASH_BYTES, 0), "the end of a span, and the state after it"


def test_a_watch_begins_with_what_is_cached() -> None:
    watched = Watched(num_blocks=MAX_CONTENTS // 2, num_clients=1)
    pool = watched.cache.pool
    watched.flush()
    assert watched.views[b"\0"].engines_of == {}
    for block_id in [pool.allocate() for _ in range(pool.num_blocks)]:
        pool.set_hash(block_id, block_id.to_bytes(32, "big")[::-1])
    watched.watch(b"\0")
    watched.flush()
    assert len(watched.views[b"\0"].engines_of) == pool.num_blocks


def test_nothing_is_collected_once_no_frontend_watches() -> None:
    watched = Watched()
    watched.settle()
    watched.feed.watch(b"\0", 0)
    assert watched.feed._changes in watched.cache._observers, "the other one watches"
    watched.feed.watch(b"\1", 0)
    watched.feed.watch(b"\1", 0)
    assert watched.feed._changes not in watched.cache._observers and watched.feed.timeout_s is None


def test_many_contents_come_in_parts() -> None:
    watched = Watched(num_blocks=2 * MAX_CONTENTS + 1, num_clients=1)
    pool = watched.cache.pool
    blocks = [pool.allocate() for _ in range(pool.num_blocks)]
    for block_id in blocks:
        pool.set_hash(block_id, block_id.to_bytes(32, "big")[::-1])
    watched.flush()
    view = watched.views[b"\0"]
    assert len(view.engines_of) == MAX_CONTENTS and watched.feed.timeout_s == 0
    pool.drop_hash(pool.block_hash(blocks[0]))
    pool.drop_hash(pool.block_hash(blocks[-1]))
    watched.flush()
    watched.flush()
    assert len(view.engines_of) == pool.num_blocks - 2, "one had been sent, one was never sent"
    assert watched.feed.timeout_s is None


def test_a_lost_update_is_noticed_with_the_next_one() -> None:
    watched = Watched(num_clients=1)
    watched.flush()
    watched.engine.submit("a", [1] * 130, 2)
    watched.engine.run()
    watched.flush(lost=frozenset([b"\0"]))
    assert not watched.resyncs and not watched.views[b"\0"].engines_of
    watched.num_live = 7
    watched.flush()
    assert watched.resyncs[b"\0"] == 1
    watched.flush()
    watched.check()
    assert len(watched.views[b"\0"].engines_of) >= 2


def test_a_frontend_that_does_not_read_costs_no_memory_and_begins_again() -> None:
    watched = Watched(num_clients=1)
    watched.flush()
    (router,) = watched.routers.values()
    router.is_peer_slow = True
    for number in range(20):
        watched.engine.submit(f"r{number}", [number] * 130, 2)
        watched.engine.run()
        watched.flush()
    assert router.sent == [] and watched.feed.timeout_s > 0
    assert not watched.outbox.has_backlog, "updates are not kept"
    watched.settle()
    watched.check()
    assert not watched.resyncs, "the core knew that it had to begin again"


def test_nobody_watches_nothing_is_observed() -> None:
    watched = Watched(num_clients=1)
    watched.cache.remove_observer(watched.positions)
    assert watched.cache.pool.observers
    watched.routers[b"\0"].is_peer_gone = True
    watched.num_live = 1
    watched.flush()
    watched.flush()
    assert not watched.cache.pool.observers and watched.feed.timeout_s is None
