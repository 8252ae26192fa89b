"""The tests of tests/gpu in Triton's interpreter, each file in a process of its own.

Triton decides for a whole process whether kernels are compiled or interpreted. To look into one of them:
`TRITON_INTERPRET=1 scripts/test tests/gpu/test_norms.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parents[1] / "gpu"


@pytest.mark.parametrize("name", sorted(path.name for path in GPU_TESTS.glob("test_*.py")))
def test_in_the_interpreter(name: str, request: pytest.FixtureRequest) -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(GPU_TESTS / name)]
    if request.config.getoption("--long"):
        command.append("--long")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=GPU_TESTS.parents[1], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.fail(done.stdout + done.stderr, pytrace=False)
