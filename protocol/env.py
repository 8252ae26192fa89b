"""The only reader of `os.environ`.

Environment variables concern the machine or debugging, never the model. Everything else is a configuration field.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Env:
    """The environment variables that octavo reads, once per process."""

    cache_dir: Path
    """Downloaded and converted models, packed weights, compiled kernels (`OCTAVO_CACHE`, default `~/.cache/octavo`)."""
    log_level: str
    """`OCTAVO_LOG_LEVEL`, else `VLLM_LOGGING_LEVEL`: DEBUG, INFO, WARNING or ERROR."""
    api_key: str | None
    """`OCTAVO_API_KEY`, else `VLLM_API_KEY`: the same as `--api-key`."""
    check_invariants: bool
    """`OCTAVO_CHECK=1`: the core verifies its state after every step."""
    runtime_dir: Path
    """Where private socket directories are created (`XDG_RUNTIME_DIR`, else the temp directory)."""
    is_offline: bool
    """`HF_HUB_OFFLINE=1`: never access the model hub."""
    cxx: str | None = None
    """`CXX`: the compiler for the native kernels, optionally with arguments."""
    hides_gpus: bool = False
    """`CUDA_VISIBLE_DEVICES` is set and names no device."""
    admin_api_key: str | None = None
    """`OCTAVO_ADMIN_API_KEY`: the same as `--admin-api-key`."""
    group_secret_key: str | None = None
    """`OCTAVO_GROUP_SECRET_KEY`: the text of a key file, instead of `--group-secret-key-file`."""
    is_dev_mode: bool = False
    """`VLLM_SERVER_DEV_MODE=1`: the same as `--enable-dev-routes`."""
    launches_early: bool = False
    """`OCTAVO_EARLY_LAUNCH=1`: kernels on a GPU may begin before the preceding kernel ends."""
    has_one_shot_all_reduce: bool = False
    """`OCTAVO_ONE_SHOT_ALL_REDUCE=1`: GPUs sum small tensors by reading each other's memory, without NCCL."""
    lora_resolver_dir: str | None = None
    """`VLLM_LORA_RESOLVER_CACHE_DIR`: the same as `--lora-resolver-dir`."""
    allows_lora_updates: bool = False
    """`VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`: the same as `--allow-runtime-lora-updating`."""
    otlp_traces_endpoint: str | None = None
    """`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`: the same as `--otlp-traces-endpoint`."""
    otlp_traces_protocol: str = "grpc"
    """`OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`, else `OTEL_EXPORTER_OTLP_PROTOCOL`: grpc or http/protobuf. OpenTelemetry
    itself reads its other variables."""
    log_config_file: str | None = None
    """`VLLM_LOGGING_CONFIG_PATH`: the same as `--log-config-file`."""
    vllm_variables: dict[str, str] = field(default_factory=dict)
    """All `VLLM_*` variables except the API key, see `api_key`. `frontend/vllm_environment.py` reads more settings from
    them."""

    @classmethod
    def read(cls) -> "Env":
        """Read the process environment."""
        get = os.environ.get
        runtime = Path(get("XDG_RUNTIME_DIR") or get("TMPDIR") or "/tmp")
        return cls(
            cache_dir=Path(get("OCTAVO_CACHE") or Path.home() / ".cache" / "octavo"),
            log_level=(get("OCTAVO_LOG_LEVEL") or get("VLLM_LOGGING_LEVEL") or "INFO").upper(),
            api_key=get("OCTAVO_API_KEY") or get("VLLM_API_KEY") or None,
            admin_api_key=get("OCTAVO_ADMIN_API_KEY") or None,
            check_invariants=get("OCTAVO_CHECK") == "1",
            runtime_dir=runtime if os.access(runtime, os.W_OK) else Path("/tmp"),
            is_offline=get("HF_HUB_OFFLINE") == "1",
            is_dev_mode=get("VLLM_SERVER_DEV_MODE") == "1",
            cxx=get("CXX") or None,
            group_secret_key=get("OCTAVO_GROUP_SECRET_KEY") or None,
            launches_early=get("OCTAVO_EARLY_LAUNCH") == "1",
            has_one_shot_all_reduce=get("OCTAVO_ONE_SHOT_ALL_REDUCE") == "1",
            lora_resolver_dir=get("VLLM_LORA_RESOLVER_CACHE_DIR") or None,
            allows_lora_updates=get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in ("1", "true"),
            otlp_traces_endpoint=get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or None,
            otlp_traces_protocol=get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
            or get("OTEL_EXPORTER_OTLP_PROTOCOL")
            or "grpc",
            log_config_file=get("VLLM_LOGGING_CONFIG_PATH") or None,
            vllm_variables={name: text for name, text in named("VLLM_").items() if name != "VLLM_API_KEY"},
            hides_gpus=get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"),
        )


def child_environment(extra: dict[str, str]) -> dict[str, str]:
    """Return a copy of this process's environment, updated with `extra`."""
    return {**os.environ, **extra}


def replace_environment(variables: dict[str, str]) -> None:
    """Replace all environment variables of this process."""
    os.environ.clear()
    os.environ.update(variables)


def set_default(name: str, value: str) -> None:
    """Set a variable that a library reads at import (`OMP_...`), unless the user has set it."""
    os.environ.setdefault(name, value)


def named(*prefixes: str) -> dict[str, str]:
    """Return the variables whose names start with one of `prefixes`, sorted by name."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}
