"""Runs the rows that use the engines' own APIs: one session per engine, only one running at a time, in rounds.

A session is started when a row first needs it, and paused while others are measured. A failed session is restarted for
the next row. The machine's ceilings are probed right before and after each measurement.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from bench_cpu_parts import models, processes, roofline
from bench_cpu_parts.ceilings import CeilingMeter
from bench_cpu_parts.engines import Engine, LlamaCpp, Octavo, Streams
from bench_cpu_parts.figures import Figure, Metric, Results
from bench_cpu_parts.models import ModelName
from bench_cpu_parts.rows import IDLE, MEMORY, OfflineRow
from bench_cpu_parts.session import EngineFailure, Session, close_all, free_port
from bench_cpu_parts.workloads import mixed_batch

IDLE_S = 5.0


@dataclass(frozen=True)
class Limits:
    """Number of rounds, and time limits."""

    rounds: int
    start_s: float
    """Limit in seconds for an engine to become ready."""
    row_s: float
    """Limit in seconds for one engine's measurement in one round."""
    is_processor_time: bool = False
    """Whether rates are per second of processor time of all processes of the engine."""


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

    def __enter__(self) -> "OfflineBench":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_all(self._sessions.values())

    def run(self, row: OfflineRow) -> None:
        """Measure every engine in each round, after a warm-up run. A failed engine skips the rest of the row."""
        print(row.metric.title, flush=True)
        costs = self._costs()
        able = [engine for engine in self.engines if engine.runs(self.model)]
        for number in range(self.limits.rounds + 1):
            for engine in list(able):
                try:
                    figure = self._measure(self._session(engine, row.streams), row, number, costs[engine.key])
                except EngineFailure as error:
                    self._drop(engine, row.metric, error)
                    able.remove(engine)
                    continue
                if number:
                    self.results.add(row.metric, engine.key, figure)
                    share = f", {figure.ceiling_share:.0%} of the ceiling" if figure.ceiling_share else ""
                    print(f"  {number} {engine.title:>14} {figure.value:9.1f} {row.metric.unit}{share}", flush=True)

    def resident(self) -> None:
        """Measure memory and idle processor time after 64 concurrent requests."""
        print(f"{MEMORY.title}; {IDLE.title}", flush=True)
        for engine in self.engines:
            try:
                session = self._session(engine, "many")
                session.wake()
                for workload in mixed_batch(random.Random(0)):
                    session.generate(workload, self.limits.row_s)
            except EngineFailure as error:
                self._drop(engine, MEMORY, error)
                continue
            pids = processes.tree(session.engine_pid)
            memory_gb = processes.pss_bytes(pids) / 1e9
            time.sleep(1.0)  # by now spinning threads sleep
            before_s = processes.cpu_seconds(pids)
            time.sleep(IDLE_S)
            idle_percent = 100 * (processes.cpu_seconds(pids) - before_s) / IDLE_S
            session.rest()
            self.results.add(MEMORY, engine.key, Figure(memory_gb))
            self.results.add(IDLE, engine.key, Figure(idle_percent))
            print(f"    {engine.title:>14} {memory_gb:.2f} GB, idle {idle_percent:.1f} %", flush=True)

    def _measure(self, session: Session, row: OfflineRow, number: int, cost: roofline.ModelCost) -> Figure:
        """Return one round's figure."""
        todo = row.make(random.Random(f"{row.key} {number}"))
        ceilings = self.meter.probe()
        session.wake()
        others = processes.LoadOfOthers([session.pid])
        before_s = processes.cpu_seconds(processes.tree(session.engine_pid))
        elapsed_s = sum(session.generate(workload, self.limits.row_s) for workload in todo)
        if self.limits.is_processor_time:
            elapsed_s = processes.cpu_seconds(processes.tree(session.engine_pid)) - before_s
        other_load = others.cores()
        session.rest()
        ceilings = ceilings.or_better(self.meter.probe())
        least_s = roofline.least_seconds(cost, ceilings, todo)
        return Figure(sum(map(row.tokens, todo)) / elapsed_s, least_s and least_s / elapsed_s, other_load)

    def _costs(self) -> dict[str, roofline.ModelCost]:
        config, bits = models.config(self.model), models.bits_per_weight(self.model)
        own = {one.key: one.bits_per_weight for one in self.engines if isinstance(one, Octavo | LlamaCpp)}
        return {one.key: roofline.model_cost(config, own.get(one.key) or bits) for one in self.engines}

    def _session(self, engine: Engine, streams: Streams) -> Session:
        """Return the engine's session; start it if necessary.

        Raises:
            EngineFailure: the session cannot be started.
        """
        name = f"{engine.key}-{self.model}" + (f"-{streams}" if engine.is_split_by_streams else "")
        if name not in self._sessions:
            print(f"    starting {name}", flush=True)
            command = engine.session(self.model, streams, free_port())
            self._sessions[name] = Session(command, self.logs / f"{name}.log", self.limits.start_s)
        return self._sessions[name]

    def _drop(self, engine: Engine, metric: Metric, error: EngineFailure) -> None:
        """Record the failure and end the engine's sessions, so that the next row starts a new one."""
        self.results.add(metric, engine.key, None)
        self.results.fail(f"{engine.title}, {metric.title}", error)
        for name in [name for name in self._sessions if name.startswith(f"{engine.key}-{self.model}")]:
            self._sessions.pop(name).close()
