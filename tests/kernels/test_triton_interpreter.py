"""The tests of tests/gpu in Triton's interpreter, in two processes of their own: kernels, and whole steps.

Triton decides for a whole process whether kernels are compiled or interpreted, so they cannot run in this one. Files
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
PIPELINE_TESTS = GPU_TESTS / "pipeline"


@pytest.mark.runs_pytest
@pytest.mark.parametrize("part", ["kernels", "pipeline"])
def test_in_the_interpreter(request: pytest.FixtureRequest, part: str) -> None:
    is_pipeline = part == "pipeline"
    chosen = [PIPELINE_TESTS] if is_pipeline else [GPU_TESTS, f"--ignore={PIPELINE_TESTS}"]
    command = [sys.executable, "-P", "-m", "pytest", "-v", "-p", "no:cacheprovider", *map(str, chosen)]
    if request.config.getoption("--long"):
        command.append("--long")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=GPU_TESTS.parents[1], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.fail(done.stdout + done.stderr, pytrace=False)
    run = set(re.findall(r"^tests/gpu/([\w/]+\.py)::.* PASSED", done.stdout, re.MULTILINE))
    files = {path for path in GPU_TESTS.rglob("test_*.py") if (path.parent == PIPELINE_TESTS) == is_pipeline}
    assert run == {path.relative_to(GPU_TESTS).as_posix() for path in files}, "every file has tests that ran"
