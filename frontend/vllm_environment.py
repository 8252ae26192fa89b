"""vLLM's environment variables: applies those that are settings in octavo, and logs the names of the others."""

import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec

from octavo.protocol.config import EngineConfig, ServerConfig
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

Struct = TypeVar("Struct", bound=msgspec.Struct)


class _Variable(NamedTuple):
    branch: str
    """Section of the engine's settings, or "server" for the server's settings."""
    setting: str
    parse: Callable[[str], Any]


_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": _Variable("cache", "kv_cache_memory_bytes", lambda text: int(float(text) * 2**30)),
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": _Variable("recovery", "execute_model_timeout", float),
    "VLLM_MAX_N_SEQUENCES": _Variable("server", "max_n_sequences", int),
    "VLLM_MAX_STOP_STRINGS": _Variable("server", "max_stop_strings", int),
}
"""Variables that set a setting which still has its default."""

_READ_BY_ENV = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    "VLLM_API_KEY",
    "VLLM_LOGGING_CONFIG_PATH",
    "VLLM_LOGGING_LEVEL",
    "VLLM_LORA_RESOLVER_CACHE_DIR",
    "VLLM_SERVER_DEV_MODE",
}

_TRUE_HERE = {"VLLM_BATCH_INVARIANT", "VLLM_DO_NOT_TRACK", "VLLM_NO_USAGE_STATS"}
"""Always true in octavo: results do not depend on the batch, and octavo reports no usage."""

KNOWN = frozenset(_SETTINGS) | _READ_BY_ENV | _TRUE_HERE
"""Variables that octavo honors."""


def engine_with_variables(config: EngineConfig, env: Env, device: str) -> EngineConfig:
    """Return the engine's settings with the values of vLLM's variables. Logs vLLM's other variables once.

    Args:
        config: given by the user; explicit settings win over variables.
        env: environment of this process.
        device: "cpu" or "cuda". As in vLLM, the variable for the size of the cache applies to CPUs only.

    Raises:
        ConfigError: a variable is not a number, or out of bounds.
    """
    _log_others(frozenset(env.vllm_variables))
    variables = {name: text for name, text in env.vllm_variables.items() if device == "cpu" or "_CPU_" not in name}
    for branch in {variable.branch for variable in _SETTINGS.values()} - {"server"}:
        config = msgspec.structs.replace(
            config, **{branch: _with_variables(getattr(config, branch), branch, variables)}
        )
    return config


def server_with_variables(config: ServerConfig, env: Env) -> ServerConfig:
    """Return the server's settings with the values of vLLM's variables.

    Raises:
        ConfigError: a variable is not a number, or out of bounds.
    """
    return _with_variables(config, "server", env.vllm_variables)


def _with_variables(struct: Struct, branch: str, variables: Mapping[str, str]) -> Struct:
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
    for name, (home, setting, parse) in _SETTINGS.items():
        if home != branch or name not in variables or getattr(struct, setting) != defaults[setting]:
            continue
        try:
            changed = msgspec.structs.replace(struct, **{setting: parse(variables[name])})
            struct = msgspec.convert(msgspec.to_builtins(changed), type(struct))  # checks the bounds
        except (ValueError, msgspec.ValidationError) as error:
            raise ConfigError(f"{name}={variables[name]}: {error}") from None
    return struct


@cache
def _log_others(names: frozenset[str]) -> None:
    others = sorted(names - _SETTINGS.keys() - _READ_BY_ENV - _TRUE_HERE)
    if others:
        logger.warning(
            "environment variables of vLLM without effect here: %s (docs/vllm-compatibility.md lists those in use)",
            ", ".join(others),
        )
