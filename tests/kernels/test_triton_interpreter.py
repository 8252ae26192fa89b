"""The tests of tests/gpu in Triton's interpreter, in a process of their own.

Triton decides for a whole process whether kernels are compiled or interpreted, so they cannot run in this one. They
share one, as its imports take longer than the tests of a file. To look into one of them:
`TRITON_INTERPRET=1 scripts/test tests/gpu/test_norms.py`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parents[1] / "gpu"


def test_in_the_interpreter(request: pytest.FixtureRequest) -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-v", "-p", "no:cacheprovider", str(GPU_TESTS)]
    if request.config.getoption("--long"):
        command.append("--long")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=GPU_TESTS.parents[1], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.fail(done.stdout + done.stderr, pytrace=False)
    run = set(re.findall(r"^tests/gpu/([\w/]+\.py)::.* PASSED", done.stdout, re.MULTILINE))
    assert run == {path.relative_to(GPU_TESTS).as_posix() for path in GPU_TESTS.rglob("test_*.py")}, (
        "every file has tests that ran"
    )
