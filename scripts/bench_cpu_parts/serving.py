"""Runs the rows that need a server of the workload's model: launch to first token, and requests over HTTP.

The load comes from scripts/bench_serve. Like sessions, servers are paused while others are measured. overhead.py
measures the cost of a request outside the model.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from bench_cpu_parts import models, processes, roofline
from bench_cpu_parts.ceilings import CeilingMeter, Ceilings
from bench_cpu_parts.engines import Engine
from bench_cpu_parts.figures import Figure, Results
from bench_cpu_parts.offline import Limits
from bench_cpu_parts.rows import LAUNCH, HttpRow
from bench_cpu_parts.server import Server, run_script
from bench_cpu_parts.session import EngineFailure, Session, close_all, free_port
from bench_cpu_parts.workloads import Workload


@dataclass
class ServingBench:
    """One server per engine that has one."""

    engines: Sequence[Engine]
    meter: CeilingMeter
    limits: Limits
    results: Results
    logs: Path
    _servers: dict[str, Server] = field(default_factory=dict)

    def __enter__(self) -> "ServingBench":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_all(self._servers.values())

    def launch(self) -> None:
        """Start every engine once to warm the caches of files and compilers, then once for each round."""
        print(LAUNCH.title, flush=True)
        for number in range(self.limits.rounds + 1):
            for engine in self.engines:
                self._close(engine)
                try:
                    figure = Figure(self._start(engine))
                    print(f"  {number} {engine.title:>14} {figure.value:9.2f} s", flush=True)
                except EngineFailure as error:
                    self.results.fail(f"{engine.title}, {LAUNCH.title}", error)
                    figure = None
                if number:
                    self.results.add(LAUNCH, engine.key, figure)

    def http(self, row: HttpRow) -> None:
        """Send the row's requests to each server in each round; the first run of each is a warm-up."""
        print(row.metrics[0][0].title, flush=True)
        for engine in self.engines:
            if engine.key not in self._servers and engine.server(models.directory("smollm2"), 0):
                try:
                    self._start(engine)
                except EngineFailure as error:
                    self.results.fail(f"{engine.title}, start of the server", error)
        for number in range(self.limits.rounds + 1):
            for engine in self.engines:
                if server := self._servers.get(engine.key):
                    self._http_round(row, number, engine, server)

    def _http_round(self, row: HttpRow, number: int, engine: Engine, server: Server) -> None:
        ceilings = self.meter.probe()
        server.wake()
        others = processes.LoadOfOthers([server.pid])
        try:
            flags = ["--url", server.url, "--seed", str(number), *row.flags]
            report = run_script("bench_serve.py", flags, self.limits.row_s)["results"]
        except EngineFailure as error:
            self.results.fail(f"{engine.title}, {row.key}", error)
            self._close(engine)
            return
        other_load = others.cores()
        server.rest()
        ceilings = ceilings.or_better(self.meter.probe())
        if number == 0:
            return
        for metric, name, statistic in row.metrics:
            value = report[name][statistic] if statistic else report[name]
            share = None
            if row.workload and not statistic:
                least_s = self._least_seconds(row.workload, ceilings)
                share = least_s and least_s * value / len(row.workload.prompts)
            self.results.add(metric, engine.key, Figure(value, share, other_load))
            print(f"  {number} {engine.title:>14} {value:9.2f} {metric.unit:10} {metric.title.strip()}", flush=True)

    def _least_seconds(self, workload: Workload, ceilings: Ceilings) -> float | None:
        cost = roofline.model_cost(models.config("smollm2"), models.bits_per_weight("smollm2"))
        return roofline.least_seconds(cost, ceilings, [workload])

    def _start(self, engine: Engine) -> float:
        """Start the engine's server, keep it, and return the seconds to its first token.

        An engine without a server is started as a session, and ended.
        """
        directory, port = models.directory("smollm2"), free_port()
        log = self.logs / f"{engine.key}-server.log"
        command = engine.server(directory, port)
        if command is None:
            with Session(engine.session("smollm2", "many", port), log, self.limits.start_s) as session:
                session.generate(Workload([[1000]], [1]), self.limits.row_s)
                return time.monotonic() - session.started
        self._servers[engine.key] = server = Server(command, log, port)
        try:
            server.wait_until_ready(self.limits.start_s)
            server.first_token(str(directory))
            elapsed_s = time.monotonic() - server.started
        except BaseException:
            self._close(engine)
            raise
        server.rest()
        return elapsed_s

    def _close(self, engine: Engine) -> None:
        if server := self._servers.pop(engine.key, None):
            server.close()
