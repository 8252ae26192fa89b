"""scripts/gpu_first_look without a GPU: cells that crash and hang, the report after each of them, a dry run."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cpu_parts.engines import Command
from bench_gpu_parts import serving
from bench_gpu_parts.calls import Calls
from bench_gpu_parts.compare import changes
from first_look_parts import drive, measuring, products, ranks
from first_look_parts.cells import TOTAL_S, Cell, all_cells
from first_look_parts.figures import cell_result, figure
from first_look_parts.report import Report
from source_tree import ROOT

DRIVER = """
import os, time
from bench_gpu_parts.callee import serve
def good(number): return {"figures": [], "detail": [number, os.getpid()], "lines": []}
def raises(): raise RuntimeError("no such kernel")
def crashes(): os.abort()
def hangs(): time.sleep(100)
serve({function.__name__: function for function in (good, raises, crashes, hangs)})
"""


def cell(key: str, function: str, limit_s: float = 20.0, **arguments: int) -> Cell:
    return Cell(key, key, "kernels", function, arguments, 1.0, limit_s)


def test_every_cell_is_a_call_that_its_process_understands() -> None:
    cells = all_cells()
    assert len({each.key for each in cells}) == len(cells)
    for each in cells:
        inspect.signature(drive.FUNCTIONS[each.function]).bind(**each.arguments)
        assert each.expected_s < each.limit_s


def test_all_cells_fit_into_seven_minutes() -> None:
    start_s = 12.0  # of a process: torch, CUDA, Triton
    cells = all_cells()
    assert sum(each.expected_s for each in cells) + start_s * len({each.group for each in cells}) <= TOTAL_S


def test_a_cell_that_raises_crashes_or_hangs_costs_no_other(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    command = Command((sys.executable, "-P", str(script)), (("PYTHONPATH", ":".join(filter(None, sys.path))),))
    path = tmp_path / "report.json"
    report = Report(path, {}, {})
    written = []

    def record(each: Cell, found: dict) -> None:
        report.add(each, found)
        written.append(list(json.loads(path.read_text())["results"]["cells"]))

    cells = [
        cell("first", "good", number=1),
        cell("raises", "raises"),
        cell("crashes", "crashes"),
        cell("hangs", "hangs", limit_s=1.0),
        cell("last", "good", number=2),
    ]
    measuring.measure(cells, lambda: Calls(command, tmp_path / "log", 20), record, 100)
    assert written == [[each.key for each in cells[: count + 1]] for count in range(5)], "written after every cell"
    assert "no such kernel" in report.cells["raises"]["error"]
    assert "it has ended" in report.cells["crashes"]["error"]
    assert "no answer within 1 s" in report.cells["hangs"]["error"]
    assert report.cells["last"]["detail"][0] == 2
    assert report.cells["last"]["detail"][1] != report.cells["first"]["detail"][1]
    assert len(report.results.failures) == 3
    assert "failed: hangs" in report.text()


def test_cells_without_time_left_are_skipped_and_start_no_process() -> None:
    found = {}
    measuring.measure([cell("late", "good")], lambda: pytest.fail("started"), lambda each, what: found.update(what), 2)
    assert found == {"left_out": "2 s were left, and it takes 1"}


def test_the_report_has_shares_of_the_ceilings_and_is_one_that_bench_gpu_compares(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = Report(path, {}, {"attention-64-1024": 70.0})
    limits = {"copy_bytes": 4e12, "matrix_flops": 8e14}
    report.add(Cell("ceilings", "", "kernels", "ceilings", {}, 1, 2), cell_result([], limits))
    # The first part is bound by its bytes (100 us), the second by its operations (200 us).
    parts = [(4e8, 8e9), (4e8, 1.6e11)]
    for column, value in (("octavo", 600.0), ("sdpa", 400.0)):
        found = figure("attention-64-1024", "attention", "us", value, column=column, seconds=value / 1e6, bound=parts)
        report.add(cell(column, "good"), cell_result([found]))
    assert "| attention | us | 70.0 | 600.0, 50% | 400.0, 75% |" in report.text()
    recorded = json.loads(path.read_text())
    recorded["results"]["rows"]["attention-64-1024"]["engines"]["octavo"]["median"] = 300.0
    assert changes(recorded, report.results)[0] == "attention, octavo: 300.0 -> 600.0 us, +100.0%: worse"


def test_the_idle_share_is_what_no_kernel_covers(tmp_path: Path) -> None:
    spans = [(0, 10), (5, 10), (20, 5), (22, 1), (40, 10)]
    events = [{"cat": "kernel", "ts": start, "dur": length} for start, length in spans]
    events.append({"cat": "cpu_op", "ts": 0, "dur": 1000})
    (tmp_path / "worker.trace.json").write_text(json.dumps({"traceEvents": events}))
    assert serving.idle_share(tmp_path) == pytest.approx(1 - (15 + 5 + 10) / 50)
    (tmp_path / "worker.trace.json").write_text(json.dumps({"traceEvents": events[-1:]}))
    with pytest.raises(ValueError, match="no kernels"):
        serving.idle_share(tmp_path)


@pytest.mark.parametrize(
    ("name", "rates"), [("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"), ("NVIDIA B200", "H200")]
)
def test_estimates_use_the_rates_of_the_gpu(name: str, rates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "IS_ON_GPU", True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert products.device_name() == rates


def test_what_only_runs_on_a_gpu_calls_functions_that_torch_has() -> None:
    """mypy does not look into scripts, and a dry run has no GPU to ask."""
    names = {
        name
        for path in (ROOT / "scripts").rglob("*.py")
        for name in re.findall(r"\btorch\.cuda\.(\w+)", path.read_text())
    }
    assert len(names) > 5
    assert [name for name in names if not hasattr(torch.cuda, name)] == []


FEW = ["environment", "ceilings", "products-Llama-3.1-8B-head"]
MANY = [
    *FEW,
    "bits-tp",
    "attention-1-2048-2048",
    "agree-Qwen3-0.6B-qkv",
    "bits-attention-sinks",
    "experts-Qwen3-30B-A3B",
    "experts-GPT-OSS-20B-mxfp4",
    "sums",
    "attention-1-8192-1",
    "early",
    "early-GPTQ",
]


def dry_run(cells: list[str], tmp_path: Path) -> tuple[dict[str, Any], str]:
    """Run cells in a process of its own, where kernels are interpreted; return the rows and what was printed."""
    command = [sys.executable, "-P", str(ROOT / "scripts" / "gpu_first_look.py"), "--dry-run", "--only", *cells]
    command += ["--json", str(tmp_path / "report.json"), "--logs", str(tmp_path / "logs")]
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout
    rows = json.loads((tmp_path / "report.json").read_text())["results"]["rows"]
    assert "copy" in rows
    assert rows["product-Llama-3.1-8B head-16"]["engines"].keys() == {"estimate", "octavo", "cublas"}
    return rows, done.stdout


def test_a_dry_run_computes_cells_with_tiny_sizes(tmp_path: Path) -> None:
    dry_run(FEW, tmp_path)


@pytest.mark.long
def test_a_dry_run_of_cells_of_all_kinds(tmp_path: Path) -> None:
    rows, printed = dry_run(MANY, tmp_path)
    assert rows.keys() >= {"agree-Qwen3-0.6B qkv", "attention-1-8192"}
    assert rows["attention-prefill-2048"]["engines"].keys() == {"estimate", "octavo"}
    assert rows["experts-GPT-OSS-20B, mxfp4-3"]["engines"].keys() == {"octavo", "estimate"}
    same_bits = ["bits-attention with sinks", "bits-experts-Qwen3-30B-A3B", "bits-early-Llama-3.1-8B"]
    same_bits += ["bits-experts-GPT-OSS-20B, mxfp4", "bits-early-Llama-3.1-8B, GPTQ", "bits-tp-Llama-3.1-8B"]
    assert [rows[key]["engines"]["octavo"]["median"] for key in same_bits] == [0] * 6
    assert "not measured, because there are fewer than two" in printed
    assert rows["early-Llama-3.1-8B-3"]["engines"].keys() == {"octavo", "early"}
    assert "| octavo, early |" in printed


def test_the_host_time_of_a_step_is_measured_without_a_gpu() -> None:
    command = [sys.executable, "-P", str(ROOT / "scripts" / "bench_gpu_host.py"), "--requests", "3", "--steps", "4"]
    command += ["--prompts", "0", "20"]
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    times = r"best tenth \d+\.\d+ ms, median \d+\.\d+ ms\n"
    assert re.fullmatch(
        rf" +3 requests,    0 prompt tokens: {times} +3 requests,   20 prompt tokens: {times}", done.stdout
    )


@pytest.mark.long
def test_ranks_add_up_without_gpus() -> None:
    found = ranks.run_ranks("cpu", 2, 64, [1, 3])["sums"]
    assert [(each["rows"], each["is_float32"], each["is_equal"]) for each in found] == [
        (1, False, True),
        (3, False, True),
        (1, True, True),
        (3, True, True),
    ]
    assert all(each["seconds"].keys() == {"octavo", "nccl"} for each in found)
