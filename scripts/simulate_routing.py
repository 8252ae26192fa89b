"""Routes a multi-turn workload to simulated engines, and compares policies by cache hits, queues and waiting.

An engine computes prompts one after another at a fixed rate and decodes all its requests side by side. Its cache keeps
the latest blocks. Engines may die: their requests move, their caches are lost, and they come back after a while.

    scripts/simulate_routing --engines 8 --requests 20000
"""

import argparse
import heapq
import itertools
import random
import statistics
import time
import zlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bench_report import report, write

from octavo.frontend.routing.router import BLOCK_TOKENS, PrefixRouter

PREFILL_TOKENS_PER_S = 20_000.0
DECODE_S = 0.01
"""Per token, however many requests decode: their number is small beside what a GPU computes at once."""
CACHE_BLOCKS = 4_000
"""Of one engine: 256,000 tokens."""
UTILIZATION = 0.7
"""Share of the time in which engines would compute prompts if nothing were cached."""
NUM_SYSTEM_PROMPTS = 40
RESTART_S = 5.0

Chooser = Callable[["Turn", list[int]], int]


@dataclass(slots=True)
class Turn:
    """One request of a conversation."""

    session: int
    token_ids: "array[int]"
    num_outputs: int
    arrival_s: float
    keys: list[int] = field(default_factory=list)
    """Of the prompt's whole blocks."""


@dataclass(slots=True)
class Engine:
    """What the simulation knows of an engine."""

    capacity: int
    cache: "OrderedDict[int, None]" = field(default_factory=OrderedDict)
    waiting: "deque[Turn]" = field(default_factory=deque)
    live: int = 0
    pending_tokens: int = 0
    """Prompt tokens that the router expects to be computed."""
    is_busy: bool = False
    life: int = 0
    """Events of an earlier life are ignored."""

    def lookup(self, keys: list[int]) -> int:
        """Return how many blocks of a prompt are cached, and cache all of them."""
        hits = sum(1 for _ in itertools.takewhile(self.cache.__contains__, keys))
        for key in keys:
            self.cache[key] = None
            self.cache.move_to_end(key)
        while len(self.cache) > self.capacity:
            self.cache.popitem(last=False)
        return hits


def turns(num_requests: int, num_engines: int, seed: int) -> Iterator[Turn]:
    """Yield the requests of conversations that share system prompts, in order of arrival."""
    rng = random.Random(seed)
    systems = [_tokens(rng, 1024) for _ in range(NUM_SYSTEM_PROMPTS)]
    mean_tokens = 2_300  # of a prompt of this workload
    rate = UTILIZATION * num_engines * PREFILL_TOKENS_PER_S / mean_tokens
    sessions = itertools.count()
    heap: list[tuple[float, int, int, array[int]]] = []
    now = 0.0
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        if heap and heap[0][0] <= now:
            _, session, turn, history = heapq.heappop(heap)
        else:
            session, turn, history = next(sessions), 0, rng.choice(systems)
        prompt = history + _tokens(rng, rng.randrange(50, 400))
        num_outputs = rng.randrange(50, 300)
        yield Turn(session, prompt, num_outputs, now)
        if turn < 9 and rng.random() < 0.85:
            answer = _tokens(rng, num_outputs)
            heapq.heappush(heap, (now + rng.uniform(5, 40), session, turn + 1, prompt + answer))


def _tokens(rng: random.Random, count: int) -> "array[int]":
    """Return tokens of any value: they are only hashed, and drawing each of them would take most of a run."""
    return array("i", rng.randbytes(4 * count))


class Simulation:
    """Engines, their events, and what is measured."""

    def __init__(self, num_engines: int, capacity: int, policy: str, death_every_s: float, seed: int) -> None:
        self.engines = [Engine(capacity) for _ in range(num_engines)]
        self.down: set[int] = set()
        self.events: list[tuple[float, int, str, int, int, Turn | None]] = []
        self._counter = itertools.count()
        self._rng = random.Random(seed)
        self._router = PrefixRouter(num_engines, num_engines * capacity)
        self._choose: Chooser = getattr(self, f"_choose_{policy}")
        self._next = itertools.count()
        self._death_every_s = death_every_s
        self.num_prompt_tokens = self.num_hit_tokens = self.num_finished = self.num_moved = self.num_deaths = 0
        self.waits: list[float] = []
        self.imbalances: list[float] = []
        self.route_s = 0.0

    def run(self, workload: Iterator[Turn]) -> None:
        """Play the workload until every request has ended."""
        if self._death_every_s:
            self._at(self._death_every_s, "death", self._rng.randrange(len(self.engines)))
        num_arrived, next_sample = 0, 1.0
        for turn in workload:
            self._play(turn.arrival_s)
            while next_sample <= turn.arrival_s:
                self._sample()
                next_sample += 1.0
            turn.keys = _keys(turn.token_ids)
            num_arrived += 1
            self._submit(turn, turn.arrival_s)
        self._death_every_s = 0.0
        self._play(float("inf"))
        assert self.num_finished == num_arrived, "requests were lost"

    def _play(self, until_s: float) -> None:
        while self.events and self.events[0][0] <= until_s:
            now, _, kind, index, life, turn = heapq.heappop(self.events)
            if kind in ("death", "back") or life == self.engines[index].life:
                getattr(self, f"_on_{kind}")(now, index, turn)

    def _at(self, when: float, kind: str, index: int, turn: Turn | None = None) -> None:
        heapq.heappush(self.events, (when, next(self._counter), kind, index, self.engines[index].life, turn))

    def _submit(self, turn: Turn, now: float) -> None:
        up = [index for index in range(len(self.engines)) if index not in self.down]
        started = time.thread_time()
        index = self._choose(turn, up)
        self.route_s += time.thread_time() - started
        engine = self.engines[index]
        engine.live += 1
        engine.waiting.append(turn)
        if not engine.is_busy:
            self._begin(now, index)

    def _begin(self, now: float, index: int) -> None:
        engine = self.engines[index]
        turn = engine.waiting[0]
        engine.is_busy = True
        num_hit = min(engine.lookup(turn.keys) * BLOCK_TOKENS, len(turn.token_ids))
        self.num_prompt_tokens += len(turn.token_ids)
        self.num_hit_tokens += num_hit
        self._at(now + (len(turn.token_ids) - num_hit) / PREFILL_TOKENS_PER_S, "first_token", index, turn)

    def _on_first_token(self, now: float, index: int, turn: Turn) -> None:
        engine = self.engines[index]
        engine.waiting.popleft()
        engine.pending_tokens = max(0, engine.pending_tokens - turn_cost.pop(id(turn), 0))
        engine.is_busy = False
        self.waits.append(now - turn.arrival_s)
        self._at(now + turn.num_outputs * DECODE_S, "finish", index, turn)
        if engine.waiting:
            self._begin(now, index)

    def _on_finish(self, now: float, index: int, turn: Turn) -> None:
        self.engines[index].live -= 1
        self.num_finished += 1

    def _on_death(self, now: float, index: int, turn: Turn | None) -> None:
        if self._death_every_s:
            self._at(now + self._death_every_s, "death", self._rng.randrange(len(self.engines)))
        if index in self.down or len(self.down) + 1 == len(self.engines):
            return
        engine = self.engines[index]
        lost = [*engine.waiting]
        lost += [event[5] for event in self.events if event[2] == "finish" and event[3:5] == (index, engine.life)]
        self.engines[index] = Engine(engine.capacity, life=engine.life + 1)
        self.down.add(index)
        self.num_deaths += 1
        self.num_moved += len(lost)
        for moved in lost:
            turn_cost.pop(id(moved), None)
            self._submit(moved, now)
        self._at(now + RESTART_S, "back", index)

    def _on_back(self, now: float, index: int, turn: Turn | None) -> None:
        self.down.discard(index)
        self._router.forget(index)

    def _sample(self) -> None:
        queues = [engine.live for index, engine in enumerate(self.engines) if index not in self.down]
        if (mean := statistics.fmean(queues)) >= 1:
            self.imbalances.append(max(queues) / mean)

    def _choose_prefix(self, turn: Turn, up: list[int]) -> int:
        index, num_new = self._router.choose(turn.token_ids, None, up, self._load)
        self.engines[index].pending_tokens += num_new
        turn_cost[id(turn)] = num_new
        return index

    def _load(self, index: int) -> tuple[int, int]:
        engine = self.engines[index]
        return engine.pending_tokens, engine.live

    def _choose_round_robin(self, turn: Turn, up: list[int]) -> int:
        return up[next(self._next) % len(up)]

    def _choose_least_loaded(self, turn: Turn, up: list[int]) -> int:
        return min(up, key=lambda index: (self.engines[index].live, self._rng.random()))

    def _choose_hashing(self, turn: Turn, up: list[int]) -> int:
        """Rendezvous hashing of the conversation: only those of an engine that dies move."""
        return max(up, key=lambda index: zlib.crc32(f"{turn.session} {index}".encode()))


turn_cost: dict[int, int] = {}
"""Prompt tokens that the router expects an engine to compute for a turn that waits."""


def _keys(token_ids: "array[int]") -> list[int]:
    data, size, key, keys = token_ids.tobytes(), BLOCK_TOKENS * token_ids.itemsize, 0, []
    for start in range(0, len(data) - size + 1, size):
        key = hash((key, data[start : start + size]))
        keys.append(key)
    return keys


def simulate(policy: str, num_engines: int, num_requests: int, death_every_s: float, seed: int) -> dict[str, float]:
    """Return what one policy achieves; the policy `one_cache` is one engine with the memory of all."""
    capacity = CACHE_BLOCKS
    simulation = Simulation(num_engines, capacity, policy, death_every_s, seed)
    simulation.run(turns(num_requests, num_engines, seed))
    waits = sorted(simulation.waits)
    return {
        "hit_rate": simulation.num_hit_tokens / simulation.num_prompt_tokens,
        "imbalance": statistics.fmean(simulation.imbalances) if simulation.imbalances else 1.0,
        "ttft_p50_s": waits[len(waits) // 2],
        "ttft_p99_s": waits[len(waits) * 99 // 100],
        "us_per_request": simulation.route_s / num_requests * 1e6,
        "deaths": simulation.num_deaths,
        "moved": simulation.num_moved,
    }


def hit_rate_of_one_cache(num_engines: int, num_requests: int, seed: int) -> float:
    """Return the hit rate of one engine that has the memory of all."""
    engine = Engine(num_engines * CACHE_BLOCKS)
    num_tokens = num_hit = 0
    for turn in turns(num_requests, num_engines, seed):
        num_tokens += len(turn.token_ids)
        num_hit += engine.lookup(_keys(turn.token_ids)) * BLOCK_TOKENS
    return num_hit / num_tokens


def main() -> None:
    """Compare the policies and print a table."""
    parser = argparse.ArgumentParser(prog="scripts/simulate_routing", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--death-every", type=float, default=0.0, metavar="S", help="seconds between two deaths")
    parser.add_argument("--policies", default="prefix,round_robin,least_loaded,hashing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the full report to this file")
    args = parser.parse_args()
    best = hit_rate_of_one_cache(args.engines, args.requests, args.seed)
    print(f"hit rate of one cache with the memory of all: {best:.1%}")
    print(
        f"{'policy':<14}{'hit rate':>9}{'of one':>8}{'imbalance':>11}"
        f"{'TTFT p50':>10}{'p99':>9}{'us each':>9}{'moved':>8}"
    )
    results = []
    for policy in args.policies.split(","):
        row = simulate(policy, args.engines, args.requests, args.death_every, args.seed)
        results.append({"policy": policy, **row})
        print(
            f"{policy:<14}{row['hit_rate']:>9.1%}{row['hit_rate'] / best:>8.1%}{row['imbalance']:>11.2f}"
            f"{row['ttft_p50_s']:>9.3f}s{row['ttft_p99_s']:>8.3f}s{row['us_per_request']:>9.1f}{row['moved']:>8.0f}",
            flush=True,
        )
    write(report("simulate_routing", vars(args), results), args.json)


if __name__ == "__main__":
    main()
