"""Runs the row for the cost of a request outside the model: each engine serves a model of 2 layers of width 64.

scripts/bench_overhead makes the model and the load. The model has a configuration and no weights, so only engines that
can make random weights take part: octavo and vLLM, which have the same flags.
"""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import bench_overhead

from bench_cpu_parts.engines import Command, Engine
from bench_cpu_parts.figures import Figure, Results
from bench_cpu_parts.offline import Limits
from bench_cpu_parts.rows import OVERHEAD
from bench_cpu_parts.server import Server, run_script
from bench_cpu_parts.session import EngineFailure, free_port

NUM_STREAMS = 200
NUM_REQUESTS = 2000
# These follow the engine's own flags, and the last value of a flag wins.
DUMMY_FLAGS = ("--load-format", "dummy", "--max-num-seqs", str(NUM_STREAMS), "--max-model-len", "2048")


def run(engines: Sequence[Engine], limits: Limits, results: Results, logs: Path) -> None:
    """Measure every engine in each round; the first run of each is a warm-up."""
    print("HTTP and coding overhead", flush=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        bench_overhead.write_model(Path(folder))
        servers: dict[str, Server] = {}
        for engine in engines:
            port = free_port()
            command = engine.server(Path(folder), port)
            if command is None:
                continue
            command = Command(command.words + DUMMY_FLAGS, command.environment)
            server = Server(command, logs / f"{engine.key}-tiny.log", port)
            stack.enter_context(server)
            try:
                server.wait_until_ready(limits.start_s)
            except EngineFailure as error:
                results.fail(f"{engine.title}, start of the tiny model", error)
                continue
            server.rest()
            servers[engine.key] = server
        for number in range(limits.rounds + 1):
            for key, server in servers.items():
                _round(key, server, number, limits, results)


def _round(key: str, server: Server, number: int, limits: Limits, results: Results) -> None:
    server.wake()
    flags = ["--url", server.url, "--rounds", "1", "--seed", str(number), "--num-requests", str(NUM_REQUESTS)]
    flags += ["--concurrency", str(NUM_STREAMS), "--modes", *OVERHEAD]
    try:
        report = run_script("bench_overhead.py", flags, limits.row_s)
    except EngineFailure as error:
        results.fail(f"{key}, overhead", error)
        report = None
    server.rest()
    if number == 0:
        return
    for mode, metric in OVERHEAD.items():
        figure = Figure(report["results"]["median"][mode]["requests_per_s"]) if report else None
        results.add(metric, key, figure)
        if figure:
            print(f"  {number} {key:>14} {figure.value:9.0f} {metric.unit} {metric.title.strip()}", flush=True)
