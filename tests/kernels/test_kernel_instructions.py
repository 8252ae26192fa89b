"""The machine code of GPU kernels where speed or bits depend on it, compiled without a GPU."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"

PROGRAM = """
import json, sys
sys.path.append(sys.argv[1])
from compiled_kernels import compiled
from kernel_launches import LAUNCHES
names = [name for name in LAUNCHES if name.startswith(("linear,", "paged_attention, heads of"))]
print(json.dumps({name: [kernel.instructions() for kernel in compiled(LAUNCHES[name], 90)] for name in names}))
"""


@pytest.fixture(scope="module")
def instructions() -> dict[str, list[Counter[str]]]:
    """Return the instructions of products and attention on Hopper; from a process where nothing is interpreted."""
    command = [sys.executable, "-P", "-c", PROGRAM, str(SUPPORT)]
    environment = {"TRITON_CACHE_DIR": str(Path.home() / ".cache" / "octavo" / "triton"), **os.environ}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: [Counter(one) for one in kernels] for name, kernels in json.loads(done.stdout).items()}


@pytest.mark.parametrize("num_rows", [64, 512, 8192])
def test_products_of_all_sizes_multiply_with_one_instruction(
    instructions: dict[str, list[Counter[str]]], num_rows: int
) -> None:
    """Two instructions might round in two ways, and then a row's bits would depend on how many there are."""
    (found,) = instructions[f"linear, {num_rows} rows"]
    assert found["HGMMA"] > 0
    assert found["HMMA"] == 0
    assert found["LDGSTS"] > 0, "no copies that run while products are computed"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_decodes_and_prompts_multiply_with_one_instruction(
    instructions: dict[str, list[Counter[str]]], head_dim: int
) -> None:
    """The other one takes the sums of weights alone, in both kernels: 4 times 16 keys, for 16 rows or in 2 loops."""
    kernels = instructions[f"paged_attention, heads of {head_dim}"]
    assert len(kernels) == 2
    for found in kernels:
        assert found["HGMMA"] > 0
        assert found["HMMA"] == 8
        assert found["LDGSTS"] > 0, "no copies that run while products are computed"
