"""GPU kernels, compiled without a GPU: they fit, spill no registers, and match kernels/budgets.json.

The default run compiles them for Hopper. A change of a kernel changes its row there; `scripts/kernel_budgets`, which
then writes the row anew, compiles for all architectures, as `--long` does.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from compiled_kernels import MAX_REGISTERS, MAX_SHARED_BYTES
from kernel_budgets import TABLE

RECORDED = json.loads(TABLE.read_text())
FEW_SPILLS = {f"paged_attention, latent, {heads} heads: split_kernel": 32 for heads in (16, 128)}
FEW_SPILLS["paged_attention, int8: chunk_kernel"] = 16
FEW_SPILLS["quantized experts, mxfp4, 200 tokens: quantized_gate_up_kernel"] = 24
"""Bytes that Hopper may spill for each request of a program; `test_kernel_instructions` finds none in the loops."""


class Measurement:
    """The table as it would be written now. Its rows arrive from another process, where nothing is interpreted.

    A test waits for its own row only: without Triton's cache, the whole table takes minutes on a slow machine.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        self._lines = process.stdout
        self.triton = json.loads(self._lines.readline() or "null")
        self.kernels: dict[str, Any] = {}

    def row(self, kernel: str) -> dict[str, Any] | None:
        """Wait for the row of a kernel; return None if the measurement ended without it."""
        while kernel not in self.kernels and self._read_row():
            pass
        return self.kernels.get(kernel)

    def read_all(self) -> None:
        while self._read_row():
            pass

    def _read_row(self) -> bool:
        line = self._lines.readline()
        if line:
            name, budgets = json.loads(line)
            self.kernels[name] = budgets
        return bool(line)


NAMES = [
    pytest.param(name, marks=() if "sm_90" in row else pytest.mark.long) for name, row in RECORDED["kernels"].items()
]


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> Iterator[Measurement]:
    command = [sys.executable, "-P", str(TABLE.parents[1] / "scripts" / "kernel_budgets.py"), "--print"]
    command += [] if request.config.getoption("--long") else ["--only", "90"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Measurement(process)
        finally:
            process.kill()


def test_every_kernel_of_the_table_fits() -> None:
    for name, row in RECORDED["kernels"].items():
        check_limits(name, row)


def check_limits(name: str, row: dict[str, Any]) -> None:
    for architecture, budget in row.items():
        allowed = FEW_SPILLS.get(name, 0) if architecture == "sm_90" else 0
        assert budget["spilled_bytes"] <= allowed, (name, architecture)
        assert budget["registers"] <= MAX_REGISTERS
        assert budget["shared_bytes"] <= MAX_SHARED_BYTES[int(architecture.removeprefix("sm_"))]


@pytest.mark.parametrize("name", NAMES)
def test_kernel_takes_what_the_table_says(measured: Measurement, name: str) -> None:
    row = measured.row(name)
    assert row, "the kernel was not compiled; the captured stderr says why"
    check_limits(name, row)
    if measured.triton == RECORDED["triton"]:
        recorded = {architecture: RECORDED["kernels"][name][architecture] for architecture in row}
        assert row == recorded, "if it is meant: scripts/kernel_budgets"


def test_the_table_names_every_kernel(measured: Measurement, request: pytest.FixtureRequest) -> None:
    measured.read_all()
    is_long = request.config.getoption("--long")
    named = [name for name, row in RECORDED["kernels"].items() if is_long or "sm_90" in row]
    assert list(measured.kernels) == named, "scripts/kernel_budgets writes the table"


@pytest.mark.parametrize("kernel", ["split_kernel", "chunk_kernel"])
def test_attention_holds_three_tiles_of_keys_and_values(kernel: str) -> None:
    """Two are on their way while one is multiplied; the compiler makes fewer of stages than one may think."""
    tiles_bytes = 3 * 2 * 64 * 128 * 2
    assert RECORDED["kernels"][f"paged_attention, heads of 128: {kernel}"]["sm_90"]["shared_bytes"] >= tiles_bytes
