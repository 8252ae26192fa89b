"""schemathesis against a real engine: every response conforms to the OpenAPI description.

A request that fits its schema may still get a 400: fields depend on one another and on the model, which a schema cannot
express. So the check `positive_data_acceptance` is left out.
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
"""Examples for each operation and phase; a count, so that a slow machine tests the same. The coverage phase ignores it
and is always complete; it finds most errors."""

LONG = ("--max-time", "240")

STORED = "/v1/(responses/|batches|files)|/inference"
"""Paths of the second part; each part has the time limit of one test."""

ALIASES = "^/score$|^/rerank$|^/v2/rerank$|^/v1/embed$"
"""Paths whose handler and request body another path has too; only `--long` sends examples to them. `test_http_pooling`
calls them all."""
NUM_ALIASES = 4

PARTS = {"exclude": 32, "include": 14}
"""Number of operations of each part; an operation is one method of a path."""


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
    excludes_aliases = part == "exclude" and limit is SHORT
    paths = f"{STORED}|{ALIASES}" if excludes_aliases else STORED
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "schemathesis.cli", "run", whole_server.url + "/openapi.json"),
            *(*limit, "--seed", "1", "--no-shrink", "--no-color", "--continue-on-failure"),
            *("--checks", "all", "--exclude-checks", "positive_data_acceptance"),
            *(f"--{part}-path-regex", paths),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Tested: {PARTS[part] - NUM_ALIASES * excludes_aliases}\n" in done.stdout
    assert re.search(r" ([1-9]\d+) generated, \1 passed\n", done.stdout), done.stdout
    # The server still works, and has logged no error.
    assert whole_server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200
    assert not [line for line in whole_server.lines if " ERROR " in line or "Traceback" in line]
