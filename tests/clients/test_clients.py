"""Client libraries of other projects, unmodified and each in an environment of its own, against a real engine.

Run by `scripts/test_clients`: the environments take minutes to install and are no part of the default run.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_environments import NotInstallable, isolated_variables
from client_libraries import CLIENTS
from servers import Server, serve
from tiny_models import make_tiny

pytestmark = pytest.mark.clients

PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT_S = 150
FLAGS = ("--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "8192", "--seed", "3")
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
LIMIT = ("--override-generation-config", '{"max_new_tokens": 64}')
"""For requests without a limit of their own: a random model seldom ends by itself."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("model"), max_position_embeddings=8192)
    with serve(model, *FLAGS, *TOOLS, *LIMIT) as server:
        yield server.wait_until_ready()


@pytest.mark.parametrize("name", CLIENTS)
def test_client(server: Server, name: str, tmp_path: Path) -> None:
    client = CLIENTS[name]
    try:
        environment = client.environment()
    except NotInstallable as error:
        pytest.skip(str(error))
    program = PROGRAMS / client.program
    if program.suffix == ".mjs":
        # Node looks for packages beside the program's real path and above it.
        for file in PROGRAMS.glob("*.mjs"):
            shutil.copy(file, tmp_path)
        (tmp_path / "node_modules").symlink_to(environment.path / "node_modules")
        program = tmp_path / client.program
    done = subprocess.run(
        [*environment.interpreter, str(program), server.url, "tiny"],
        cwd=tmp_path,
        env=isolated_variables(tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert tuple(re.findall("^exercised: (.*)$", done.stdout, re.MULTILINE)) == client.features
