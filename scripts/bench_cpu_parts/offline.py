"""Runs the rows that go through the engines' own APIs: sessions side by side, one awake at a time, round by round.

A session is started when a row first needs it, and rests while others are measured; one that fails is started anew for
the next row. Right before each measurement the machine's ceilings are probed.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from bench_cpu_parts import models, processes, roofline
from bench_cpu_parts.ceilings import CeilingMeter
from bench_cpu_parts.engines import Engine, Streams
from bench_cpu_parts.figures import Figure, Results
from bench_cpu_parts.models import ModelName
from bench_cpu_parts.rows import IDLE, MEMORY, OfflineRow
from bench_cpu_parts.session import EngineFailure, Session, close_all, free_port
from bench_cpu_parts.workloads import mixed_batch

IDLE_S = 5.0


@dataclass(frozen=True)
class Limits:
    """How often, and how long at most."""

    rounds: int
    start_s: float
    """For an engine to be ready."""
    row_s: float
    """For one engine's measurement in one round."""


@dataclass
class OfflineBench:
    """The sessions of all engines with one model."""

    model: ModelName
    engines: Sequence[Engine]
    meter: CeilingMeter
    limits: Limits
    results: Results
    logs: Path
    _sessions: dict[str, Session] = field(default_factory=dict)
    _hopeless: set[str] = field(default_factory=set)
    """Those that could not be started: not tried again."""

    def __enter__(self) -> "OfflineBench":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_all(self._sessions.values())

    def run(self, row: OfflineRow) -> None:
        """Measure every engine in each round; a first run of each does not count."""
        print(f"{row.metric.title}", flush=True)
        costs = self._costs()
        able = [engine for engine in self.engines if self._measure(engine, row, 0, costs) is not None]
        for number in range(1, self.limits.rounds + 1):
            for engine in able:
                figure = self._measure(engine, row, number, costs)
                self.results.add(row.metric, engine.key, figure)
                if figure:
                    share = f", {figure.ceiling_share:.0%} of the ceiling" if figure.ceiling_share else ""
                    print(f"  {number} {engine.title:>14} {figure.value:9.1f} {row.metric.unit}{share}", flush=True)

    def resident(self) -> None:
        """After 64 requests at once: the memory that the engine holds, and the time it takes doing nothing."""
        print(f"{MEMORY.title}; {IDLE.title}", flush=True)
        for engine in self.engines:
            session = self._session(engine, "many")
            if session is None:
                continue
            session.wake()
            try:
                for workload in mixed_batch(random.Random(0)):
                    session.generate(workload, self.limits.row_s)
            except EngineFailure as error:
                self._drop(session, f"{engine.title}, {MEMORY.title}", error)
                continue
            pids = processes.tree(session.engine_pid)
            memory_gb = processes.pss_bytes(pids) / 1e9
            time.sleep(1.0)  # threads that spin before they sleep are asleep by now
            before_s = processes.cpu_seconds(pids)
            time.sleep(IDLE_S)
            idle_percent = 100 * (processes.cpu_seconds(pids) - before_s) / IDLE_S
            session.rest()
            self.results.add(MEMORY, engine.key, Figure(memory_gb))
            self.results.add(IDLE, engine.key, Figure(idle_percent))
            print(f"    {engine.title:>14} {memory_gb:.2f} GB, idle {idle_percent:.1f} %", flush=True)

    def _measure(
        self, engine: Engine, row: OfflineRow, number: int, costs: dict[str, roofline.ModelCost]
    ) -> Figure | None:
        """Return one round's figure; None if the engine cannot, or failed."""
        session = self._session(engine, row.streams)
        if session is None:
            return None
        todo = row.make(random.Random(f"{row.key} {number}"))
        ceilings = self.meter.probe()
        session.wake()
        others = processes.LoadOfOthers([session.pid])
        try:
            elapsed_s = sum(session.generate(workload, self.limits.row_s) for workload in todo)
        except EngineFailure as error:
            self._drop(session, f"{engine.title}, {row.metric.title}", error)
            return None
        other_load = others.cores()
        session.rest()
        least_s = roofline.least_seconds(costs[engine.key], ceilings, todo)
        return Figure(sum(map(row.tokens, todo)) / elapsed_s, least_s and least_s / elapsed_s, other_load)

    def _costs(self) -> dict[str, roofline.ModelCost]:
        config, bits = models.config(self.model), models.bits_per_weight(self.model)
        quantized = {"octavo-int8": 8.0, "octavo-int4": 4.0}
        return {engine.key: roofline.model_cost(config, quantized.get(engine.key, bits)) for engine in self.engines}

    def _session(self, engine: Engine, streams: Streams) -> Session | None:
        """Return the engine's session, started if need be; None if it has none for this model or cannot start."""
        name = f"{engine.key}-{self.model}-{streams}"
        if name in self._sessions or name in self._hopeless:
            return self._sessions.get(name)
        command = engine.session(self.model, streams, free_port())
        if command is None:
            self._hopeless.add(name)
            return None
        # Engines that serve one stream and many in the same way need one session only.
        twin = f"{engine.key}-{self.model}-{'one' if streams == 'many' else 'many'}"
        if not engine.is_split_by_streams and twin in self._sessions:
            return self._sessions[twin]
        print(f"    starting {name}", flush=True)
        try:
            self._sessions[name] = Session(command, self.logs / f"{name}.log", self.limits.start_s)
        except EngineFailure as error:
            self._hopeless.add(name)
            self.results.fail(f"start of {name}", error)
        return self._sessions.get(name)

    def _drop(self, session: Session, where: str, error: EngineFailure) -> None:
        """Note the failure and end the session, so that the next row starts a new one."""
        self.results.fail(where, error)
        session.close()
        self._sessions = {name: other for name, other in self._sessions.items() if other is not session}
