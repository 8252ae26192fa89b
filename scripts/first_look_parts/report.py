"""The results so far: the table, and the report in the format of scripts/bench_gpu."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench_report
from bench_cpu_parts.figures import Figure, Metric, Results
from bench_cpu_parts.table import table

from first_look_parts.cells import Cell

TITLES = {
    "estimate": "estimate",
    "octavo": "octavo",
    "early": "octavo, early",
    "tp-invariant": "octavo, tp-invariant",
    "one-shot": "octavo, one kernel",
    "nccl": "NCCL's sum",
    "cublas": "cuBLAS",
    "sdpa": "torch SDPA",
}
"""Titles of the columns, in order."""


@dataclass
class Report:
    """Collects cells, and writes the file after each of them.

    Args:
        path: the JSON file; `None` to write none.
        settings: the settings of this run, for the file.
        estimates: estimated values of octavo's figures, by key and in their unit.
    """

    path: Path | None
    settings: dict[str, str]
    estimates: Mapping[str, float]
    results: Results = field(default_factory=Results)
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    ceilings: dict[str, float] | None = None

    def add(self, cell: Cell, found: dict[str, Any]) -> None:
        """Record and print a finished cell, and write all of them to the file."""
        self.cells[cell.key] = found
        if cell.function == "ceilings":
            self.ceilings = found.get("detail")
        if "error" in found:
            self.results.failures.append(f"{cell.title}: {found['error']}")
        for each in found.get("figures", []):
            self._add_figure(each)
        outcome = found.get("left_out") or (found["error"].splitlines()[0] if "error" in found else "")
        print(f"{found.get('elapsed_s', 0.0):6.1f} s of {cell.expected_s:4.0f}  {cell.title}  {outcome}", flush=True)
        self._write()

    def text(self) -> str:
        """Return the table, the lines of the cells, and the list of failed and missing cells."""
        lines = ["", table(self.results, TITLES), ""]
        for found in self.cells.values():
            lines += found.get("lines", [])
        lines += [f"failed: {failure}" for failure in self.results.failures]
        lines += [f"left out: {key}: {found['left_out']}" for key, found in self.cells.items() if "left_out" in found]
        return "\n".join(lines)

    def _add_figure(self, found: dict[str, Any]) -> None:
        metric = Metric(found["key"], found["title"], found["unit"], found["is_higher_better"], digits=found["digits"])
        if found["column"] == "octavo" and found["key"] in self.estimates:
            self.results.add(metric, "estimate", Figure(self.estimates[found["key"]]))
        self.results.add(metric, found["column"], Figure(found["value"], self._share(found)))

    def _share(self, found: dict[str, Any]) -> float | None:
        """Return the fraction of the ceilings; `None` if they or the minimum work are unknown."""
        if self.ceilings is None or not found["bound"]:
            return None
        copy, matrix = self.ceilings["copy_bytes"], self.ceilings["matrix_flops"]
        least_s = sum(max(num_bytes / copy, flops / matrix) for num_bytes, flops in found["bound"])
        share: float = least_s / found["seconds"]
        return share

    def _write(self) -> None:
        if self.path is None:
            return
        measured = {"cells": self.cells, "ceilings": self.ceilings, **self.results.as_json()}
        bench_report.write(bench_report.report("gpu_first_look", self.settings, measured), str(self.path))
