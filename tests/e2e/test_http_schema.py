"""schemathesis against a real engine: whatever the description of the API allows or forbids is answered as it says.

Requests that fit their schema may be rejected with 400 all the same: fields depend on one another, on the model and on
its length, which a schema cannot say. So the one check left out is `positive_data_acceptance`.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from servers import serve

SMALL = ["--max-model-len", "128", "--max-num-seqs", "8", "--served-model-name", "tiny", "--max-n-sequences", "16"]

SHORT = ("--max-examples", "8")
"""For each operation and phase; counted, so that a slow machine finds the same. The phase of boundary values, which
finds most, ignores it and always runs whole."""

LONG = ("--max-time", "240")

NUM_OPERATIONS = 43
"""In the description; one is counted for each method of a path."""


@pytest.mark.parametrize("limit", [SHORT, pytest.param(LONG, marks=pytest.mark.long)], ids=["short", "long"])
def test_no_request_breaks_the_server_or_the_description(model: Path, tmp_path: Path, limit: tuple[str, str]) -> None:
    directories = ("--torch-profiler-dir", str(tmp_path / "traces"), "--batch-dir", str(tmp_path / "batches"))
    with serve(model, *SMALL, *directories) as server:
        server.wait_until_ready()
        done = subprocess.run(
            [
                *(sys.executable, "-P", "-m", "schemathesis.cli", "run", server.url + "/openapi.json"),
                *(*limit, "--seed", "1", "--no-shrink", "--no-color", "--continue-on-failure"),
                *("--checks", "all", "--exclude-checks", "positive_data_acceptance"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"Tested: {NUM_OPERATIONS}\n" in done.stdout
        assert re.search(r" ([1-9]\d+) generated, \1 passed\n", done.stdout), done.stdout
        # It is none the worse for it, and has had nothing to complain of itself.
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200
        assert not [line for line in server.lines if " ERROR " in line or "Traceback" in line]
