"""Routes a multi-turn workload to simulated engines, and compares policies by cache hits, queues and waiting.

An engine computes prompts one after another at a fixed rate and decodes all its requests side by side. Its cache keeps
the latest blocks, and what it stores and evicts is reported to every HTTP process a little later. Each of them gets a
part of the requests, at random, and knows the load of the others from reports that come once a second. Engines may die:
their requests move, their caches are lost, and they come back after a while.

The policy `prefix` is octavo's. `estimates` and `reports` are the same with only a part of what it knows: the prompts
that a process has sent to each engine, and what engines report.

    scripts/simulate_routing --engines 8 --requests 20000 --processes 4
"""

# long: one simulation, whose events share its state

import argparse
import heapq
import itertools
import random
import statistics
import time
import zlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bench_report import report, write

from octavo.frontend.routing.router import PrefixRouter
from octavo.protocol.buffers import Buffer
from octavo.protocol.events import CacheUpdate
from octavo.protocol.ids import ID_BYTES
from octavo.protocol.prefix_hash import ROOT_HASH, SHORT_HASH_BYTES, SPAN_TOKENS, hash_last_block

PREFILL_TOKENS_PER_S = 20_000.0
DECODE_S = 0.01
"""Per token, however many requests decode: their number is small beside what a GPU computes at once."""
CACHE_BLOCKS = 4_000
"""Spans in the cache of one engine: 256,000 tokens."""
BLOCK_SIZE = 16
UTILIZATION = 0.7
"""Share of the time in which engines would compute prompts if nothing were cached."""
NUM_SYSTEM_PROMPTS = 40
RESTART_S = 5.0
REPORT_DELAY_S = 0.05
"""From the first token of a prompt until all processes know that its blocks are cached."""
STATS_INTERVAL_S = 1.0

PREFIX_POLICIES = ("prefix", "estimates", "reports")

Chooser = Callable[["Turn", list[int]], tuple[int, int]]
"""Returns an engine, and the prompt tokens that it has to compute if they are known."""


@dataclass(slots=True)
class Turn:
    """One request of a conversation."""

    session: int
    token_ids: "array[int]"
    num_outputs: int
    arrival_s: float
    process: int = 0
    """That routes it."""
    engine: int = 0
    num_new_tokens: int = 0
    """Prompt tokens that the process expects the engine to compute; 0 once it has."""
    keys: list[int] = field(default_factory=list)
    """Short hashes of the prompt's whole spans."""


@dataclass(slots=True)
class Engine:
    """What the simulation knows of an engine."""

    capacity: int
    cache: "OrderedDict[int, None]" = field(default_factory=OrderedDict)
    waiting: "deque[Turn]" = field(default_factory=deque)
    live: int = 0
    is_busy: bool = False
    changes: "dict[int, bool]" = field(default_factory=dict)
    """Spans that were stored or evicted since the last report."""
    reports_soon: bool = False
    num_reports: int = 0
    life: int = 0
    """Events of an earlier life are ignored."""

    def lookup(self, keys: list[int]) -> "tuple[int, array[int], array[int]]":
        """Return how many spans of a prompt are cached, and cache all of them; return which are stored and evicted."""
        hits = sum(1 for _ in itertools.takewhile(self.cache.__contains__, keys))
        stored, evicted = array("Q", [key for key in keys if key not in self.cache]), array("Q")
        for key in keys:
            self.cache[key] = None
            self.cache.move_to_end(key)
        while len(self.cache) > self.capacity:
            evicted.append(self.cache.popitem(last=False)[0])
        return hits, stored, evicted


class ReportedOnly(PrefixRouter):
    """Knows nothing but what engines report."""

    def _remember(self, keys: Sequence[int], engine: int, *, can_expire: bool) -> None:
        pass


@dataclass(slots=True)
class Process:
    """An HTTP process."""

    router: PrefixRouter
    pending: list[int]
    """Prompt tokens that each engine probably has to compute for requests of this process."""
    live: list[int]
    """Live requests of this process on each engine."""


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

    def __init__(
        self, num_engines: int, num_processes: int, capacity: int, policy: str, death_every_s: float, seed: int
    ) -> None:
        self.engines = [Engine(capacity) for _ in range(num_engines)]
        self.down: set[int] = set()
        self.events: list[tuple[float, int, str, int, int, Turn | None]] = []
        self._counter = itertools.count()
        self._rng = random.Random(seed)
        self._now = 0.0
        self._has_reports = policy in ("prefix", "reports")
        kind = ReportedOnly if policy == "reports" else PrefixRouter
        self._processes = [
            Process(
                kind(num_engines, num_engines * capacity, BLOCK_SIZE, lambda: self._now),
                [0] * num_engines,
                [0] * num_engines,
            )
            for _ in range(num_processes)
        ]
        self._reported_live = [0] * num_engines
        self._choose: Chooser = getattr(self, "_choose_" + ("prefix" if policy in PREFIX_POLICIES else policy))
        self._next = itertools.count()
        self._death_every_s = death_every_s
        self.num_prompt_tokens = self.num_hit_tokens = self.num_finished = self.num_moved = self.num_deaths = 0
        self.waits: list[float] = []
        self.imbalances: list[float] = []
        self.route_s = self.view_s = 0.0

    def run(self, workload: Iterator[Turn]) -> None:
        """Play the workload until every request has ended."""
        if self._death_every_s:
            self._at(self._death_every_s, "death", self._rng.randrange(len(self.engines)))
        num_arrived, next_sample = 0, 1.0
        for turn in workload:
            self._play(turn.arrival_s)
            while next_sample <= turn.arrival_s:
                self._sample()
                next_sample += STATS_INTERVAL_S
            turn.keys = _keys(turn.token_ids)
            turn.process = self._rng.randrange(len(self._processes))
            num_arrived += 1
            self._submit(turn, turn.arrival_s)
        self._death_every_s = 0.0
        self._play(float("inf"))
        assert self.num_finished == num_arrived, "requests were lost"

    def _play(self, until_s: float) -> None:
        while self.events and self.events[0][0] <= until_s:
            now, _, kind, index, life, turn = heapq.heappop(self.events)
            self._now = now
            if kind in ("death", "back") or life == self.engines[index].life:
                getattr(self, f"_on_{kind}")(now, index, turn)
        self._now = max(self._now, until_s) if until_s < float("inf") else self._now

    def _at(self, when: float, kind: str, index: int, turn: Turn | None = None) -> None:
        heapq.heappush(self.events, (when, next(self._counter), kind, index, self.engines[index].life, turn))

    def _submit(self, turn: Turn, now: float) -> None:
        up = [index for index in range(len(self.engines)) if index not in self.down]
        started = time.thread_time()
        index, turn.num_new_tokens = self._choose(turn, up)
        self.route_s += time.thread_time() - started
        turn.engine = index
        self._change_load(turn, turn.num_new_tokens, 1)
        engine = self.engines[index]
        engine.live += 1
        engine.waiting.append(turn)
        if not engine.is_busy:
            self._begin(now, index)

    def _begin(self, now: float, index: int) -> None:
        engine = self.engines[index]
        turn = engine.waiting[0]
        engine.is_busy = True
        num_spans, stored, evicted = engine.lookup(turn.keys)
        num_hit = min(num_spans * SPAN_TOKENS, len(turn.token_ids))
        self.num_prompt_tokens += len(turn.token_ids)
        self.num_hit_tokens += num_hit
        end_s = now + (len(turn.token_ids) - num_hit) / PREFILL_TOKENS_PER_S
        self._at(end_s, "first_token", index, turn)
        engine.changes.update(dict.fromkeys(stored, True))
        engine.changes.update(dict.fromkeys(evicted, False))

    def _report_soon(self, now: float, index: int) -> None:
        if self._has_reports and not self.engines[index].reports_soon:
            self.engines[index].reports_soon = True
            self._at(now + REPORT_DELAY_S, "report", index)

    def _on_report(self, now: float, index: int, turn: Turn | None) -> None:
        engine = self.engines[index]
        stored = array("Q", [key for key, is_stored in engine.changes.items() if is_stored])
        removed = array("Q", [key for key, is_stored in engine.changes.items() if not is_stored])
        update = CacheUpdate(
            epoch=0,
            watch=0,
            sequence=engine.num_reports,
            starts_over=engine.num_reports == 0,
            num_live=engine.live,
            stored=Buffer(stored.tobytes()),
            removed=Buffer(removed.tobytes()),
        )
        engine.changes, engine.reports_soon, engine.num_reports = {}, False, engine.num_reports + 1
        self._report_live(index, update.num_live)
        started = time.thread_time()
        for process in self._processes:
            is_complete = process.router.view.apply(index, update)
            assert is_complete, "no report is lost"
        self.view_s += time.thread_time() - started

    def _on_first_token(self, now: float, index: int, turn: Turn) -> None:
        engine = self.engines[index]
        engine.waiting.popleft()
        self._change_load(turn, -turn.num_new_tokens, 0)
        turn.num_new_tokens = 0
        self._report_soon(now, index)
        engine.is_busy = False
        self.waits.append(now - turn.arrival_s)
        self._at(now + turn.num_outputs * DECODE_S, "finish", index, turn)
        if engine.waiting:
            self._begin(now, index)

    def _on_finish(self, now: float, index: int, turn: Turn) -> None:
        self.engines[index].live -= 1
        self._change_load(turn, 0, -1)
        self.num_finished += 1
        self._report_soon(now, index)

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
            self._change_load(moved, -moved.num_new_tokens, -1)
            self._submit(moved, now)
        self._at(now + RESTART_S, "back", index)

    def _on_back(self, now: float, index: int, turn: Turn | None) -> None:
        self.down.discard(index)
        for process in self._processes:
            process.router.forget(index)

    def _sample(self) -> None:
        for index, engine in enumerate(self.engines):
            self._report_live(index, engine.live)
        queues = [engine.live for index, engine in enumerate(self.engines) if index not in self.down]
        if (mean := statistics.fmean(queues)) >= 1:
            self.imbalances.append(max(queues) / mean)

    def _report_live(self, index: int, num_live: int) -> None:
        self._reported_live[index] = num_live
        for process in self._processes:
            self._update_load(process, index)

    def _change_load(self, turn: Turn, num_tokens: int, num_live: int) -> None:
        process = self._processes[turn.process]
        process.pending[turn.engine] += num_tokens
        process.live[turn.engine] += num_live
        self._update_load(process, turn.engine)

    def _update_load(self, process: Process, index: int) -> None:
        num_live = max(process.live[index], self._reported_live[index])
        started = time.thread_time()
        process.router.set_load(index, process.pending[index], num_live)
        self.route_s += time.thread_time() - started

    def _choose_prefix(self, turn: Turn, up: list[int]) -> tuple[int, int]:
        return self._processes[turn.process].router.choose(turn.token_ids, (), tuple(up))

    def _choose_round_robin(self, turn: Turn, up: list[int]) -> tuple[int, int]:
        return up[next(self._next) % len(up)], 0

    def _choose_least_loaded(self, turn: Turn, up: list[int]) -> tuple[int, int]:
        """By the true load of all processes."""
        return min(up, key=lambda index: (self.engines[index].live, self._rng.random())), 0

    def _choose_hashing(self, turn: Turn, up: list[int]) -> tuple[int, int]:
        """Rendezvous hashing of the conversation: only those of an engine that dies move."""
        return max(up, key=lambda index: zlib.crc32(f"{turn.session} {index}".encode())), 0


def _keys(token_ids: "array[int]") -> list[int]:
    data, size, block_hash, keys = token_ids.tobytes(), SPAN_TOKENS * ID_BYTES, ROOT_HASH, []
    for start in range(0, len(data) - size + 1, size):
        block_hash = hash_last_block(block_hash, data[start : start + size], 0, BLOCK_SIZE, ())
        keys.append(int.from_bytes(block_hash[:SHORT_HASH_BYTES], "little"))
    return keys


def simulate(
    policy: str, num_engines: int, num_processes: int, num_requests: int, death_every_s: float, seed: int
) -> dict[str, float]:
    """Return what one policy achieves."""
    simulation = Simulation(num_engines, num_processes, CACHE_BLOCKS, policy, death_every_s, seed)
    simulation.run(turns(num_requests, num_engines, seed))
    waits = sorted(simulation.waits)
    return {
        "hit_rate": simulation.num_hit_tokens / simulation.num_prompt_tokens,
        "imbalance": statistics.fmean(simulation.imbalances) if simulation.imbalances else 1.0,
        "ttft_p50_s": waits[len(waits) // 2],
        "ttft_p99_s": waits[len(waits) * 99 // 100],
        "us_per_request": simulation.route_s / num_requests * 1e6,
        "us_of_reports": simulation.view_s / num_requests / num_processes * 1e6,
        "deaths": simulation.num_deaths,
        "moved": simulation.num_moved,
    }


def hit_rate_of_one_cache(num_engines: int, num_requests: int, seed: int) -> float:
    """Return the hit rate of one engine that has the memory of all."""
    engine = Engine(num_engines * CACHE_BLOCKS)
    num_tokens = num_hit = 0
    for turn in turns(num_requests, num_engines, seed):
        num_tokens += len(turn.token_ids)
        num_hit += engine.lookup(_keys(turn.token_ids))[0] * SPAN_TOKENS
    return num_hit / num_tokens


def main() -> None:
    """Compare the policies and print a table."""
    parser = argparse.ArgumentParser(prog="scripts/simulate_routing", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--processes", type=int, default=1, help="HTTP processes, each of which routes by itself")
    parser.add_argument("--death-every", type=float, default=0.0, metavar="S", help="seconds between two deaths")
    parser.add_argument("--policies", default="prefix,estimates,reports,round_robin,least_loaded,hashing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the full report to this file")
    args = parser.parse_args()
    best = hit_rate_of_one_cache(args.engines, args.requests, args.seed)
    print(f"hit rate of one cache with the memory of all: {best:.1%}")
    print(
        f"{'policy':<14}{'hit rate':>9}{'of one':>8}{'imbalance':>11}"
        f"{'TTFT p50':>10}{'p99':>9}{'us each':>9}{'reports':>9}{'moved':>8}"
    )
    results = []
    for policy in args.policies.split(","):
        row = simulate(policy, args.engines, args.processes, args.requests, args.death_every, args.seed)
        results.append({"policy": policy, **row})
        print(
            f"{policy:<14}{row['hit_rate']:>9.1%}{row['hit_rate'] / best:>8.1%}{row['imbalance']:>11.2f}"
            f"{row['ttft_p50_s']:>9.3f}s{row['ttft_p99_s']:>8.3f}s{row['us_per_request']:>9.1f}"
            f"{row['us_of_reports']:>9.1f}{row['moved']:>8.0f}",
            flush=True,
        )
    write(report("simulate_routing", vars(args), results), args.json)


if __name__ == "__main__":
    main()
