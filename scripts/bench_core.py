"""Cost of the core process without a model: the real core, codecs and sockets over a worker that answers immediately.

Processor time is that of the core process, so other processes disturb it little. Latencies are wall-clock time and
need an idle machine. `--compare` prints an earlier report next to this one.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from bench_core_parts import frontend_cost, frontend_waiting, http_health, scenarios
from bench_core_parts.scenarios import Figures
from bench_report import report, write

RUNNING = (64, 256, 1024, 4096)
WAITING = (0, 10_000, 100_000)
LONG_PROMPTS = ((1000, 1000), (8000, 1000), (32_000, 250))
"""Length of the prompts, and number of waiting requests."""
QUEUES = ((20_000, 100), (100_000, 100), (2000, 1000), (250, 32_000))
"""Number of waiting requests, and length of their prompts."""
WINDOW_S = 2.0


def main() -> None:
    """Run the selected measurements, print a table and write the report."""
    args = _arguments()
    known = json.loads(Path(args.compare).read_text())["results"] if args.compare else {}
    figures: Figures = {}
    for name, measure in _measurements(args.quick).items():
        if args.only and not any(word in name for word in args.only):
            continue
        measured = measure()
        figures.update(measured)
        for key, value in measured.items():
            _show(key, value, known.get(key))
        write(report("bench_core", {"quick": args.quick}, figures), args.json)


def _measurements(is_quick: bool) -> dict[str, Callable[[], Figures]]:
    """Return what there is to measure, by names that `--only` selects."""
    running = (64, 1024) if is_quick else RUNNING
    waiting = (0, 10_000) if is_quick else WAITING
    window_s = WINDOW_S / 2 if is_quick else WINDOW_S
    measurements: dict[str, Callable[[], Figures]] = {}
    for count in running:
        measurements[f"plan {count}"] = lambda count=count: scenarios.plan_and_commit(count, window_s)
    for count in running:
        measurements[f"steps {count}"] = lambda count=count: scenarios.steps(count, waiting, 100, window_s)
    if not is_quick:
        for length, waits in LONG_PROMPTS:
            measurements[f"long {length}"] = lambda length=length, waits=waits: scenarios.steps(
                64, (0, waits), length, window_s
            )
    for count, length in QUEUES[:1] if is_quick else QUEUES:
        measurements[f"queue {count}x{length}"] = lambda count=count, length=length: scenarios.queue(
            count, length, min(20_000, count // 2)
        )
    for count, length in ((2000, 100),) if is_quick else ((20_000, 100), (2000, 1000), (250, 32_000)):
        measurements[f"frontend {count}x{length}"] = lambda count=count, length=length: scenarios.frontend_memory(
            count, length
        )
    measurements["http"] = lambda: http_health.health(*((100, 1000, 4000) if is_quick else (1000, 20_000, 80_000)))
    measurements["ratio"] = lambda: scenarios.queue_ratio(*((64, 10_000) if is_quick else (1024, 100_000)), window_s)
    measurements["streams"] = lambda: frontend_cost.frontend_cost(256 if is_quick else 1000)
    measurements["waiting"] = lambda: frontend_waiting.frontend_waiting(500 if is_quick else 4000)
    measurements["flood"] = lambda: scenarios.flood(64)
    return measurements


def _show(name: str, value: float, known: float | None) -> None:
    earlier = f"{known:>12,.1f}  {value / known:>6.2f} x" if known else ""
    print(f"{name:<76}{value:>12,.1f}{earlier}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_core", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer and smaller measurements, in about a minute")
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="plan, steps, long, queue, frontend, http, ratio, streams, waiting or flood",
    )
    parser.add_argument("--json", metavar="FILE", help="write the report to this file")
    parser.add_argument("--compare", metavar="FILE", help="an earlier report: shown beside, with the ratio to it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
