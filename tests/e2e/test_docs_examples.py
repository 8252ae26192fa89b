"""Runs every example of the documentation.

A fenced block is an example when its info string says so: three backquotes, then `python example` or `bash example`.
It talks to `http://127.0.0.1:8000`, which here becomes a server of the default model, and loads `MODEL`, which becomes
that model. A page that needs flags names them in a comment of its own: `<!-- server: --flag value -->`.

The first two examples of a page run by default, the others with `--long`: many start an engine or a command.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import warm_python
from default_model import default_model
from servers import Server
from source_tree import ROOT

pytestmark = pytest.mark.model

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ADDRESS = "http://127.0.0.1:8000"
FLAGS = ("--max-model-len", "2048", "--kv-cache-memory-bytes", "256M", "--served-model-name", "smollm2")
TIMEOUT_S = 180
NUM_SHORT = 2
"""How many examples of a page run without `--long`."""

_FENCE = re.compile(r"^```(python|bash) example\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SERVER = re.compile(r"<!-- server: (.*?) -->")


@dataclass(frozen=True)
class Example:
    """One block of a page."""

    page: Path
    number: int
    language: str
    code: str
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.page.stem}-{self.number}"


def examples() -> Iterator[Example]:
    for page in PAGES:
        text = page.read_text()
        flags = tuple(flag for found in _SERVER.findall(text) for flag in found.split())
        for number, (language, code) in enumerate(_FENCE.findall(text), 1):
            yield Example(page, number, language, code, flags)


EXAMPLES = sorted(examples(), key=lambda example: example.flags)


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[tuple[str, ...], Server]]:
    running: dict[tuple[str, ...], Server] = {}
    try:
        yield running
    finally:
        for server in running.values():
            server.close()


def server_with(flags: tuple[str, ...], running: dict[tuple[str, ...], Server]) -> Server:
    """Return the server that runs with these flags; another one is ended for it."""
    if flags not in running:
        for other in list(running):
            running.pop(other).close()
        running[flags] = Server(default_model(), *FLAGS, *flags)
        running[flags].wait_until_ready()
    return running[flags]


@pytest.mark.parametrize(
    "example",
    [pytest.param(each, id=each.name, marks=pytest.mark.long if each.number > NUM_SHORT else ()) for each in EXAMPLES],
)
def test_example_runs(example: Example, servers: dict[tuple[str, ...], Server], tmp_path: Path) -> None:
    code = example.code.replace("MODEL", str(default_model()))
    if ADDRESS in code:
        code = code.replace(ADDRESS, server_with(example.flags, servers).url)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path}
    if example.language == "python":
        done = warm_python.run(["-c", code], cwd=tmp_path, env=environment, timeout=TIMEOUT_S)
    else:
        command = ["bash", "-euo", "pipefail", "-c", code]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.strip(), "an example shows something"


def test_there_are_examples() -> None:
    assert len(EXAMPLES) > 10
