"""Checks octavo on a GPU in at most seven minutes: whether results are right, and how far it is from the limits.

Every cell is written to the report as soon as it has finished, and runs in a process that may crash or hang. --dry-run
needs no GPU: it lists all cells with their expected times and runs each of them with tiny sizes on the CPU.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from bench_gpu_parts.compare import changes, load
from first_look_parts.cells import TOTAL_S, all_cells
from first_look_parts.measuring import measure, open_driver
from first_look_parts.report import Report


def main() -> None:
    """Measure the selected cells; print the table last."""
    args = _arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    cells = [cell for cell in all_cells() if not args.only or any(cell.key.startswith(word) for word in args.only)]
    logs = Path(args.logs or tempfile.mkdtemp(prefix="gpu_first_look-"))
    logs.mkdir(parents=True, exist_ok=True)
    expected_s = sum(cell.expected_s for cell in cells)
    print(f"{len(cells)} cells, {expected_s:.0f} s expected on an H200; logs: {logs}", flush=True)
    settings = {key: str(value) for key, value in vars(args).items()}
    report = Report(None if args.json is None else Path(args.json), settings, {})
    try:
        measure(cells, open_driver(logs, is_dry_run=args.dry_run), report.add, args.seconds)
    except KeyboardInterrupt:
        report.results.failures.append("interrupted: the rest is missing")
    if args.compare and (before := load(args.compare)):
        print("\n".join(changes(before, report.results)))
    print(report.text())
    if report.results.failures:
        sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu_first_look", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="KEY", help="cells whose key begins with one of these")
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help=f"for all of it; default: {TOTAL_S:.0f}")
    parser.add_argument("--dry-run", action="store_true", help="run every cell with tiny sizes, without a GPU")
    parser.add_argument("--logs", metavar="DIR", help="directory for logs; default: a temporary one")
    parser.add_argument("--json", metavar="FILE", help="write the report to this file, after every cell")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="an earlier report")
    return parser.parse_args()


if __name__ == "__main__":
    main()
