"""The program behind `scripts/stress`. Exit code 0: every request ended once and correctly; 1: some did not."""

import argparse
import logging
import sys
import time
from dataclasses import replace

from simulation.campaign import Totals, attempt_all, orders, shrink
from simulation.variants import VARIANTS

REPORT_INTERVAL_S = 10.0


def main(arguments: list[str]) -> int:
    """Run what the command line asks for and return the exit code."""
    options = _parser().parse_args(arguments)
    logging.getLogger("octavo").setLevel(logging.CRITICAL)  # dying frontends are expected here
    sizes = options.requests, options.kills, options.ranks, options.engines
    wanted = list(orders(options.seed, *sizes, options.variant))
    if options.only_requests is not None or options.only_kills is not None:
        if len(wanted) > 1:
            sys.stderr.write("--only-requests and --only-kills are for one run: see what a failing run prints\n")
            return 2
        wanted = [replace(wanted[0], asks=options.only_requests, faults=options.only_kills)]
    totals, start, next_report = Totals(), time.monotonic(), REPORT_INTERVAL_S
    for outcome in attempt_all(wanted, options.processes):
        num_known = len(totals.failures)
        totals.add(outcome)
        for failure in totals.failures[num_known:]:
            # Flushed now, because a long run may be interrupted.
            print(f"failed: {failure.message}: {failure.order.command}", flush=True)
        elapsed = time.monotonic() - start
        if elapsed > next_report:
            next_report = elapsed + REPORT_INTERVAL_S
            num_failed = len(totals.failures)
            print(f"{elapsed:.0f} s: {totals.num_runs} of {len(wanted)} runs, {num_failed} failed", flush=True)
        if len(totals.failures) >= options.max_failures:
            break
    elapsed = time.monotonic() - start
    print(*totals.lines, sep="\n")
    print(
        f"{elapsed:.1f} s, {totals.counts['num_answers'] / elapsed:.0f} answers and "
        f"{totals.counts['num_steps'] / elapsed:.0f} steps a second"
    )
    for failure in totals.failures:
        smallest = shrink(failure, options.shrink_s) if options.shrink_s else failure
        print(f"\n{smallest.details}\nreplay: {failure.order.command}")
        if smallest is not failure:
            print(f"smaller: {smallest.order.command}")
    return 1 if totals.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/stress", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="requests of all runs together (default 10000)")
    parser.add_argument("--kills", type=int, default=200, help="processes killed or stopped, and connections cut (200)")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; those that follow count on (0)")
    parser.add_argument("--ranks", type=int, default=1, help="workers that share each step of an engine (1)")
    parser.add_argument("--engines", type=int, default=1, help="engines that share the requests (1)")
    parser.add_argument("--variant", choices=VARIANTS, default="", help="change each run in one way")
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time (1)")
    parser.add_argument("--max-failures", type=int, default=5, help="end after this many failed runs (5)")
    parser.add_argument("--shrink-s", type=float, default=60.0, help="seconds to look for a smaller failing run (60)")
    parser.add_argument("--only-requests", type=_indices, help="of a single run: keep only these, as 3,17,20 or none")
    parser.add_argument("--only-kills", type=_indices, help="of a single run: keep only these")
    return parser


def _indices(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(int(word) for word in text.split(","))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
