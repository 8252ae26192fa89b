"""One session each of unmodified coding agents: the model calls their shell tool, they run it, the model ends.

`forced_turns.ForcedTurns` makes a tiny random model do that. Each agent uses a different API of the server.
"""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from client_environments import NotInstallable, isolated_variables, node_environment
from servers import serve
from tiny_models import make_tiny

pytestmark = pytest.mark.clients

MAX_MODEL_LEN = 200_000
"""The prompts of agents have tens of thousands of bytes, which are tokens here."""
FLAGS = ("--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN))
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--middleware", "forced_turns.ForcedTurns")
TIMEOUT_S = 150
PROMPT = "Write a note."
COMMAND = "echo hello > note.txt"


@dataclass(frozen=True)
class Agent:
    """A coding agent of the npm registry, and how to use it without a terminal."""

    package: str
    executable: str
    arguments: tuple[str, ...]
    """{url} is the server's address."""
    call: dict[str, Any]
    """Its shell tool, and the arguments that write a file."""
    variables: dict[str, str]


AGENTS = {
    "Qwen Code (chat completions)": Agent(
        "@qwen-code/qwen-code@0.24.4",
        "qwen",
        (
            *("--bare", "--auth-type", "openai", "--openai-api-key", "none", "--openai-base-url", "{url}/v1"),
            *("--model", "tiny", "--approval-mode", "yolo", PROMPT),
        ),
        {"name": "run_shell_command", "arguments": {"command": COMMAND, "is_background": False}},
        {},
    ),
    "Codex (responses)": Agent(
        "@openai/codex@0.171.0",
        "codex",
        (
            *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--model", "tiny"),
            *("-c", "model_provider=octavo", "-c"),
            'model_providers.octavo={{name="octavo",base_url="{url}/v1",wire_api="responses",env_key="KEY"}}',
            PROMPT,
        ),
        {"name": "exec_command", "arguments": {"cmd": COMMAND}},
        {"KEY": "none"},
    ),
    "Claude Code (messages)": Agent(
        "@anthropic-ai/claude-code@2.1.332",
        "claude",
        ("--print", PROMPT, "--model", "tiny", "--allowedTools", "Bash"),
        {"name": "Bash", "arguments": {"command": COMMAND}},
        {
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        },
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("model"), max_position_embeddings=MAX_MODEL_LEN)


@pytest.mark.parametrize("name", AGENTS)
def test_agent(model: Path, name: str, tmp_path: Path) -> None:
    agent = AGENTS[name]
    try:
        environment = node_environment((agent.package,))
    except NotInstallable as error:
        pytest.skip(str(error))
    variables = {"FORCED_CALL": json.dumps(agent.call), "PYTHONPATH": str(Path(__file__).parent)}
    workspace, home = tmp_path / "workspace", tmp_path / "home"
    workspace.mkdir()
    home.mkdir()
    with serve(model, *FLAGS, *TOOLS, environment=variables, is_warm=False) as server:
        url = server.wait_until_ready().url
        done = subprocess.run(
            [environment.path / "node_modules" / ".bin" / agent.executable]
            + [argument.format(url=url) for argument in agent.arguments],
            cwd=workspace,
            env=isolated_variables(home) | {key: value.format(url=url) for key, value in agent.variables.items()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    assert done.returncode == 0, done.stdout + done.stderr + server.output
    assert os.listdir(workspace) == ["note.txt"]
    assert (workspace / "note.txt").read_text() == "hello\n"
    assert "done" in done.stdout
