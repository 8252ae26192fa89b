"""How many kernels tests/gpu compiles on a GPU: most of its time there, and a GPU may be there for minutes only.

Counted without a GPU and without compiling (`tests/support/compile_only.py`). The steps of `pipeline` are not among
them: they need a stream of a GPU.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # counts for half a minute, for runs on GPUs alone

TESTS = Path(__file__).parents[1]

MOST = {
    "test_all_reduce.py": 16,
    "test_copy_blocks.py": 2,
    "test_elementwise.py": 150,
    "test_expert_adapters.py": 60,
    "test_experts.py": 76,
    "test_experts_quantized.py": 60,
    "test_interpreter.py": 8,
    "test_latent_attention.py": 70,
    "test_linear.py": 95,
    "test_linear_quantized.py": 80,
    "test_lora.py": 40,
    "test_norms.py": 60,
    "test_paged_attention.py": 148,
    "test_recurrences.py": 45,
    "test_rope_store_kv.py": 42,
    "test_sample.py": 75,
    "test_sampling.py": 30,
    "test_varlen_attention.py": 20,
}
"""Limits of compilations by file, a third above the counted number: a test ends at its first wrong result, and results
are whatever memory holds. A file that needs more has a parameter too many that kernels are compiled for.
docs/gpu-kernels.md has the arithmetic."""


@pytest.fixture(scope="module")
def counted() -> dict[str, int]:
    """Return the number of compilations by file; from a process of its own, because Triton's driver is replaced."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "compile_only", "-p", "no:cacheprovider"]
    command += [str(TESTS / "gpu"), "--ignore", str(TESTS / "gpu" / "pipeline")]
    environment = {**os.environ, "PYTHONPATH": str(TESTS / "support"), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        file: int(count) for file, count in re.findall(r"^(\w+\.py): (\d+) compilations", done.stdout, re.MULTILINE)
    }


def test_every_file_is_counted(counted: dict[str, int]) -> None:
    assert set(counted) == set(MOST) == {path.name for path in (TESTS / "gpu").glob("test_*.py")}


@pytest.mark.parametrize("file", MOST)
def test_few_kernels_are_compiled(counted: dict[str, int], file: str) -> None:
    assert 1 <= counted[file] <= MOST[file]
