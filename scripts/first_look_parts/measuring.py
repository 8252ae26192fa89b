"""Runs cells in separate processes, one after another, and records their results."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench_cpu_parts.engines import Command
from bench_cpu_parts.session import EngineFailure
from bench_gpu_parts.calls import Calls

from first_look_parts.cells import Cell

PARTS = Path(__file__).parent
START_LIMIT_S = 60.0
LEAST_USEFUL_S = 3.0
"""Minimum time in seconds that must be left to start a cell."""

OpenCalls = Callable[[], Calls]
Record = Callable[[Cell, dict[str, Any]], None]


def open_driver(logs: Path, *, is_dry_run: bool) -> OpenCalls:
    """Return a function that starts a measuring process.

    Args:
        logs: directory for the log of the process.
        is_dry_run: whether kernels are interpreted on the CPU.
    """
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path), "HF_HUB_OFFLINE": "1"}
    if is_dry_run:
        support = PARTS.parents[1] / "tests" / "support"
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] += f":{support}"
    command = Command((sys.executable, "-P", str(PARTS / "drive.py")), tuple(environment.items()))
    return lambda: Calls(command, logs / "first_look.log", START_LIMIT_S)


def measure(
    cells: Sequence[Cell],
    open_calls: OpenCalls,
    record: Record,
    total_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Measure all cells for which there is enough time.

    Args:
        cells: the cells, in order.
        open_calls: starts a measuring process.
        record: called with each cell as soon as it is over: `figures`, `detail` and `lines`, or `error` or
            `left_out`; and `elapsed_s`.
        total_s: time limit for all cells in seconds.
        clock: returns the time in seconds.
    """
    ends_at = clock() + total_s
    calls: Calls | None = None
    group = None
    try:
        for cell in cells:
            if cell.group != group and calls is not None:
                calls.close()
                calls = None
            group = cell.group
            started = clock()
            left_s = ends_at - started
            if left_s < max(LEAST_USEFUL_S, cell.expected_s / 2):
                record(cell, {"left_out": f"{left_s:.0f} s were left, and it takes {cell.expected_s:.0f}"})
                continue
            try:
                calls = calls or open_calls()
                # The start of the process does not count as the cell's time.
                limit_s = max(1.0, min(cell.limit_s, ends_at - clock()))
                found = calls.call(cell.function, limit_s, **cell.arguments)
            except EngineFailure as error:
                found = {"error": str(error)}
                # A failed kernel may have left the device unusable for this process.
                if calls is not None:
                    calls.close()
                    calls = None
            record(cell, {**found, "elapsed_s": clock() - started})
    finally:
        if calls is not None:
            calls.close()
