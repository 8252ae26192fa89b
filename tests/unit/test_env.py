"""The environment variables that a deployment for vLLM brings along."""

import logging

import pytest

from octavo.frontend.http.configure import api_keys
from octavo.frontend.vllm_environment import engine_with_variables, server_with_variables
from octavo.protocol.config import ServerConfig
from octavo.protocol.config.sources import engine_config
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError


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
    assert "VLLM_API_KEY" not in Env.read().vllm_variables, "settings are logged, keys are not"


def variables(monkeypatch: pytest.MonkeyPatch, **values: str) -> Env:
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return Env.read()


def test_variables_of_vllm_are_settings_that_have_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    env = variables(
        monkeypatch,
        VLLM_CPU_KVCACHE_SPACE="2",
        VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS="60",
        VLLM_MAX_N_SEQUENCES="8",
        VLLM_MAX_STOP_STRINGS="3",
    )
    given = engine_config({"model": "M"})
    cpu, cuda = (engine_with_variables(given, env, device) for device in ("cpu", "cuda"))
    assert (cpu.cache.kv_cache_memory_bytes, cpu.recovery.execute_model_timeout) == (2 * 2**30, 60.0)
    assert (cuda.cache.kv_cache_memory_bytes, cuda.recovery.execute_model_timeout) == (None, 60.0)
    chosen = engine_config({"model": "M", "kv_cache_memory_bytes": 2**20, "execute_model_timeout": 5})
    assert engine_with_variables(chosen, env, "cpu") == chosen
    server = server_with_variables(ServerConfig(max_stop_strings=5), env)
    assert (server.max_n_sequences, server.max_stop_strings) == (8, 5)


@pytest.mark.parametrize("value", ["many", "0"])
def test_a_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    env = variables(monkeypatch, VLLM_MAX_N_SEQUENCES=value)
    with pytest.raises(ConfigError, match=f"VLLM_MAX_N_SEQUENCES={value}: "):
        server_with_variables(ServerConfig(), env)


def test_the_log_variables_of_vllm_come_after_octavos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_LOG_LEVEL", raising=False)
    env = variables(monkeypatch, VLLM_LOGGING_LEVEL="debug", VLLM_LOGGING_CONFIG_PATH="log.json")
    assert (env.log_level, env.log_config_file) == ("DEBUG", "log.json")
    assert variables(monkeypatch, OCTAVO_LOG_LEVEL="error").log_level == "ERROR"


def test_other_variables_of_vllm_are_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    env = variables(monkeypatch, VLLM_USE_DEEP_GEMM="1", VLLM_BATCH_INVARIANT="1", VLLM_PORT="1", VLLM_API_KEY="k")
    with caplog.at_level(logging.WARNING, logger="octavo"):
        for _ in range(2):
            engine_with_variables(engine_config({"model": "M"}), env, "cpu")
    (record,) = caplog.records
    assert "without effect here: VLLM_PORT, VLLM_USE_DEEP_GEMM (" in record.getMessage()
