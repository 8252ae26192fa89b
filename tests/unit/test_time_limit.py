"""A test that hangs fails, says where it hung, and the next one runs."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from specs import PYTHONPATH

HANGS = """
    import os, threading, pytest

    @pytest.fixture
    def endless():
        threading.Event().wait()

    def test_hangs():
        reader, _ = os.pipe()
        os.read(reader, 1)

    def test_needs_a_fixture_that_hangs(endless): ...

    def test_passes(): ...
"""


def test_each_phase_of_a_test_ends_in_time(tmp_path: Path) -> None:
    (tmp_path / "test_them.py").write_text(textwrap.dedent(HANGS))
    options = ["-q", "-p", "time_limit", "-p", "no:cacheprovider", "-o", "test_time_limit_s=0.1"]
    result = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "1 failed, 1 passed, 1 error" in result.stdout, result.stdout + result.stderr
    assert result.stdout.count("the test took longer than 0.1 s") >= 2
    assert "in test_hangs" in result.stdout and "in endless" in result.stdout
