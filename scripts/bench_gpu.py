"""Compares octavo on a GPU with the GPU's ceilings and with peers, in one run of eight minutes.

It measures the ceilings, steps of models with random weights, attention alone, and two end-to-end workloads through all
three processes. The report is written after every cell. A section that takes too long is cut short and reported.
--dry-run needs no GPU.
"""

import argparse
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from bench_cpu_parts.figures import Results
from bench_cpu_parts.session import EngineFailure
from bench_cpu_parts.table import table
from bench_gpu_parts.budget import Budget
from bench_gpu_parts.compare import changes, load
from bench_gpu_parts.fake import FakeGpu
from bench_gpu_parts.machine import TITLES, Gpu
from bench_gpu_parts.sections import SECTIONS, TOTAL_S, Run, Section
from bench_report import report, write

RECORDED = Path(__file__).with_name("bench_gpu_recorded.json")
"""The recorded report that is compared."""


def main() -> None:
    """Run the selected measurements, print the table last and write the report."""
    args = _arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    run = Run(_gpu(args), Results(), quick=args.quick)
    try:
        print(run.gpu.name(), flush=True)
    except EngineFailure as error:
        raise SystemExit(f"no GPU can be used (--dry-run needs none): {error}") from error
    sections = [section for section in SECTIONS if section.key in args.only]
    budget = Budget(args.seconds, [section.share for section in sections])

    def save() -> None:
        measured = {
            "gpu": run.gpu.name(),
            "ceilings": run.limits and asdict(run.limits),
            "left_out": budget.left_out,
            **run.results.as_json(),
        }
        write(report("bench_gpu", {key: str(value) for key, value in vars(args).items()}, measured), args.json)

    run.on_change = save
    try:
        _measure(run, sections, budget)
    except KeyboardInterrupt:
        run.results.failures.append("interrupted: the rest is missing")
    text = summary(run, budget.left_out, args.compare)
    save()
    print(text)
    if run.results.failures:
        sys.exit(1)


def summary(run: Run, left_out: list[str], recorded: Path) -> str:
    """Return the final output: failures and omissions, changes since the recorded run, and the table."""
    lines = ["", *(f"failed: {failure}" for failure in run.results.failures)]
    lines += [f"left out: {what}" for what in left_out]
    before = load(recorded)
    lines += changes(before, run.results) if before else [f"no run is recorded in {recorded.name}"]
    return "\n".join([*lines, "", table(run.results, TITLES)])


def _measure(run: Run, sections: list[Section], budget: Budget) -> None:
    for index, section in enumerate(sections):
        slot = budget.slot(index)
        print(f"{section.key}, at most {slot.left_s():.0f} s", flush=True)
        try:
            section.measure(run, slot)
        except EngineFailure as error:
            run.results.fail(section.key, error)


def _gpu(args: argparse.Namespace) -> Gpu:
    if args.dry_run:
        return FakeGpu()
    # Its parts import torch.
    from bench_gpu_parts.cuda import CudaGpu

    logs = Path(args.logs or tempfile.mkdtemp(prefix="bench_gpu-"))
    logs.mkdir(parents=True, exist_ok=True)
    print(f"logs: {logs}", flush=True)
    return CudaGpu(logs)


def _arguments() -> argparse.Namespace:
    keys = [section.key for section in SECTIONS]
    parser = argparse.ArgumentParser(prog="scripts/bench_gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--only", nargs="+", choices=keys, default=keys, metavar="SECTION", help=f"of {', '.join(keys)}"
    )
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help=f"for all of it; default: {TOTAL_S:.0f}")
    parser.add_argument("--quick", action="store_true", help="measure only the most important cases")
    parser.add_argument("--dry-run", action="store_true", help="show the table with made-up figures, without a GPU")
    parser.add_argument("--logs", metavar="DIR", help="directory for logs; default: a temporary one")
    parser.add_argument("--json", metavar="FILE", help="write the full report to this file")
    parser.add_argument("--compare", type=Path, default=RECORDED, metavar="FILE", help="an earlier report")
    args = parser.parse_args()
    if "ceilings" not in args.only:
        args.only = ["ceilings", *args.only]
    return args


if __name__ == "__main__":
    main()
