"""schemathesis against a real engine: whatever the description of the API allows or forbids is answered as it says.

Requests that fit their schema may be rejected with 400 all the same: fields depend on one another, on the model and on
its length, which a schema cannot say. So the one check left out is `positive_data_acceptance`.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import Server, serve

SMALL = ["--max-model-len", "128", "--max-num-seqs", "8", "--served-model-name", "tiny", "--max-n-sequences", "16"]

SHORT = ("--max-examples", "4")
"""For each operation and phase; counted, so that a slow machine finds the same. The phase of boundary values, which
finds most, ignores it and always runs whole."""

LONG = ("--max-time", "240")

STORED = "/v1/(responses/|batches|files)|/inference"
"""Paths of the second part; each part has the time of one test."""

PARTS = {"exclude": 32, "include": 14}
"""Operations of each part; one is counted for each method of a path."""


@pytest.fixture(scope="module")
def whole_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server on which all of these routes do something."""
    path = tmp_path_factory.mktemp("server")
    directories = ("--torch-profiler-dir", str(path / "traces"), "--batch-dir", str(path / "batches"))
    with serve(model, *SMALL, *directories) as server:
        yield server.wait_until_ready()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("limit", [SHORT, pytest.param(LONG, marks=pytest.mark.long)], ids=["short", "long"])
def test_no_request_breaks_the_server_or_the_description(
    whole_server: Server, tmp_path: Path, limit: tuple[str, str], part: str
) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "schemathesis.cli", "run", whole_server.url + "/openapi.json"),
            *(*limit, "--seed", "1", "--no-shrink", "--no-color", "--continue-on-failure"),
            *("--checks", "all", "--exclude-checks", "positive_data_acceptance"),
            *(f"--{part}-path-regex", STORED),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Tested: {PARTS[part]}\n" in done.stdout
    assert re.search(r" ([1-9]\d+) generated, \1 passed\n", done.stdout), done.stdout
    # It is none the worse for it, and has had nothing to complain of itself.
    assert whole_server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200
    assert not [line for line in whole_server.lines if " ERROR " in line or "Traceback" in line]
