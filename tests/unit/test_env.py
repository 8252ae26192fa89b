"""The environment variables that a deployment for vLLM brings along."""

import pytest

from octavo.frontend.http.configure import api_keys
from octavo.protocol.config import ServerConfig


@pytest.mark.parametrize(
    ("environment", "flags", "accepted"),
    [
        ({}, [], []),
        ({"VLLM_API_KEY": "theirs"}, [], ["theirs"]),
        ({"VLLM_API_KEY": "theirs", "OCTAVO_API_KEY": ""}, [], ["theirs"]),
        ({"VLLM_API_KEY": "theirs", "OCTAVO_API_KEY": "ours"}, [], ["ours"]),
        ({"VLLM_API_KEY": "theirs"}, ["flag"], ["flag"]),
    ],
)
def test_keys_come_from_the_command_line_then_octavo_then_vllm(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], flags: list[str], accepted: list[str]
) -> None:
    for name in ("OCTAVO_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert api_keys(ServerConfig(api_key=flags)) == accepted
