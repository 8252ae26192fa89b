"""GPU kernels, compiled without a GPU: they fit, spill no registers, and match kernels/budgets.json."""

import json
import subprocess
import sys
from typing import Any

import pytest
from compiled_kernels import MAX_REGISTERS, MAX_SHARED_BYTES
from kernel_budgets import TABLE

RECORDED = json.loads(TABLE.read_text())
FEW_SPILLS = {f"paged_attention, latent, {heads} heads: split_kernel": 32 for heads in (16, 128)}
FEW_SPILLS["paged_attention, int8: chunk_kernel"] = 16
"""Bytes that Hopper may spill for each request of a program; `test_kernel_instructions` finds none in the loops."""


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """Return the table as it would be written now; in a process of its own, where nothing is interpreted."""
    command = [sys.executable, "-P", str(TABLE.parents[1] / "scripts" / "kernel_budgets.py"), "--print"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_table_names_every_kernel(measured: dict[str, Any]) -> None:
    assert list(measured["kernels"]) == list(RECORDED["kernels"]), "scripts/kernel_budgets writes the table"


@pytest.mark.parametrize("name", RECORDED["kernels"])
def test_kernel_takes_what_the_table_says(measured: dict[str, Any], name: str) -> None:
    for architecture, budget in measured["kernels"][name].items():
        allowed = FEW_SPILLS.get(name, 0) if architecture == "sm_90" else 0
        assert budget["spilled_bytes"] <= allowed, architecture
        assert budget["registers"] <= MAX_REGISTERS
        assert budget["shared_bytes"] <= MAX_SHARED_BYTES[int(architecture.removeprefix("sm_"))]
    if measured["triton"] == RECORDED["triton"]:
        assert measured["kernels"][name] == RECORDED["kernels"][name], "if it is meant: scripts/kernel_budgets"


@pytest.mark.parametrize("kernel", ["split_kernel", "chunk_kernel"])
def test_attention_holds_three_tiles_of_keys_and_values(kernel: str) -> None:
    """Two are on their way while one is multiplied; the compiler makes fewer of stages than one may think."""
    tiles_bytes = 3 * 2 * 64 * 128 * 2
    assert RECORDED["kernels"][f"paged_attention, heads of 128: {kernel}"]["sm_90"]["shared_bytes"] >= tiles_bytes
