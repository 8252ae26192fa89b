"""`Simulation`: HTTP processes that route requests to engines, and the resulting measurements."""

import heapq
import itertools
import random
import statistics
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from octavo.frontend.routing.router import PrefixRouter
from octavo.protocol.buffers import Buffer
from octavo.protocol.events import CacheUpdate
from octavo.protocol.prefix_hash import SPAN_TOKENS
from simulate_routing_parts.engine import Capacity, Engine
from simulate_routing_parts.workload import BLOCK_SIZE, PREFILL_TOKENS_PER_S, Turn, span_keys

DECODE_S = 0.01
"""Seconds per decoded token, for any number of requests: their number is small compared with a GPU's capacity."""
RESTART_S = 5.0
REPORT_DELAY_S = 0.05
"""Seconds from the first token of a prompt until all processes know that its blocks are cached."""
STATS_INTERVAL_S = 1.0

PREFIX_POLICIES = ("prefix", "estimates", "reports", "blocks")

Chooser = Callable[["Turn", list[int]], tuple[int, int]]
"""Returns an engine, and the number of prompt tokens that it has to compute, if known."""


class ReportedOnly(PrefixRouter):
    """A router that knows only the engines' reports."""

    def _remember(self, keys: Sequence[int], engine: int, *, can_expire: bool) -> None:
        pass


@dataclass(slots=True)
class Process:
    """An HTTP process."""

    router: PrefixRouter
    pending: list[int]
    """Prompt tokens that each engine probably has to compute for requests of this process."""
    live: list[int]
    """Number of live requests of this process on each engine."""


class Simulation:
    """The engines, their events, and the measurements."""

    def __init__(
        self, num_engines: int, num_processes: int, capacity: Capacity, policy: str, death_every_s: float, seed: int
    ) -> None:
        self.engines = [Engine(capacity) for _ in range(num_engines)]
        self.down: set[int] = set()
        self.events: list[tuple[float, int, str, int, int, Turn | None]] = []
        self._counter = itertools.count()
        self._rng = random.Random(seed)
        self._now = 0.0
        self._has_reports = policy in ("prefix", "reports", "blocks")
        self._reported_interval = 0 if policy == "blocks" else capacity.state_interval
        kind = ReportedOnly if policy == "reports" else PrefixRouter
        self._processes = [
            Process(
                kind(num_engines, num_engines * capacity.num_spans, BLOCK_SIZE, lambda: self._now),
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
        """Run the workload until every request has ended."""
        if self._death_every_s:
            self._at(self._death_every_s, "death", self._rng.randrange(len(self.engines)))
        num_arrived, next_sample = 0, 1.0
        for turn in workload:
            self._play(turn.arrival_s)
            while next_sample <= turn.arrival_s:
                self._sample()
                next_sample += STATS_INTERVAL_S
            turn.keys = span_keys(turn.token_ids)
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
        num_hit = min(engine.lookup(turn.keys) * SPAN_TOKENS, len(turn.token_ids))
        self.num_prompt_tokens += len(turn.token_ids)
        self.num_hit_tokens += num_hit
        end_s = now + (len(turn.token_ids) - num_hit) / PREFILL_TOKENS_PER_S
        self._at(end_s, "first_token", index, turn)

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
            state_interval=self._reported_interval,
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
        """Choose the engine with the lowest true load of all processes."""
        return min(up, key=lambda index: (self.engines[index].live, self._rng.random())), 0

    def _choose_hashing(self, turn: Turn, up: list[int]) -> tuple[int, int]:
        """Choose by rendezvous hashing of the conversation: if an engine dies, only its conversations move."""
        return max(up, key=lambda index: zlib.crc32(f"{turn.session} {index}".encode())), 0
