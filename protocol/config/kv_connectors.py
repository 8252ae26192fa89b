"""vLLM connectors for which octavo has a setting: `--kv-transfer-config` is translated to that setting."""

from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.protocol.config.engine import CacheConfig
from octavo.protocol.config.kv_transfer import KVTransferFields, read_fields, require_unset
from octavo.protocol.errors import ConfigError

_GIB = 2**30
_HOST = ("OffloadingConnector", "SimpleCPUOffloadConnector")
_FILES = ("ExampleConnector", "SharedStorageConnector")
_IMPLIED = {
    "spec_name": ("CPUOffloadingSpec",),
    "eviction_policy": ("lru",),
    "lazy_offload": (False, True),  # when vLLM copies out; octavo always copies on eviction
    "kv_offload_backend": ("cpu",),
    "offload_prompt_only": (False,),
}
"""Values that describe what octavo does anyway."""


def use_own_settings(cache: CacheConfig) -> CacheConfig:
    """Return the cache settings, with vLLM connectors replaced by octavo's settings.

    Raises:
        ConfigError: the connector has fields without an equivalent setting, or that setting is given too.
    """
    given = read_fields(cache.kv_transfer_config)
    if given is None or given.kv_connector_module_path or given.kv_connector not in (*_HOST, *_FILES):
        return cache
    if given.kv_role != "kv_both":
        raise _error(f"{given.kv_connector} needs the kv_role kv_both: the engine finds its own blocks")
    require_unset(given, ("engine_id", "kv_ip", "kv_port", "kv_buffer_size"), "leave it out")
    extra = dict(given.kv_connector_extra_config)
    own = _files(given, extra) if given.kv_connector in _FILES else _host(given, extra)
    for name, values in _IMPLIED.items():
        if name in extra and extra.pop(name) not in values:
            raise _error(f"{given.kv_connector}: {name} must be {' or '.join(map(repr, values))}")
    if extra:
        raise _error(f"{given.kv_connector}: {', '.join(sorted(extra))} is not supported")
    for name in own:
        if name != "kv_offloading_disk_size" and getattr(cache, name):
            raise _error(f"{given.kv_connector} and --{name.replace('_', '-')} are two names of one setting")
    return msgspec.structs.replace(cache, kv_transfer_config=None, **own)


def _host(given: KVTransferFields, extra: dict[str, Any]) -> Mapping[str, Any]:
    own: dict[str, Any] = {}
    if "cpu_bytes_to_use_per_rank" in extra:
        own["swap_space"] = _bytes(given, extra.pop("cpu_bytes_to_use_per_rank")) / _GIB
        extra.pop("cpu_bytes_to_use", None)  # vLLM prefers the other one
    elif "cpu_bytes_to_use" in extra:
        own["kv_offloading_size"] = _bytes(given, extra.pop("cpu_bytes_to_use")) / _GIB
    else:
        raise _error(f"{given.kv_connector} needs cpu_bytes_to_use in kv_connector_extra_config")
    if path := extra.pop("disk_path", None):
        own["kv_offloading_path"] = str(path)
    if "disk_capacity_bytes" in extra:
        if not path:
            raise _error(f"{given.kv_connector}: disk_capacity_bytes needs disk_path")
        own["kv_offloading_disk_size"] = _bytes(given, extra.pop("disk_capacity_bytes")) / _GIB
    return own


def _files(given: KVTransferFields, extra: dict[str, Any]) -> Mapping[str, Any]:
    if not isinstance(path := extra.pop("shared_storage_path", None), str) or not path:
        raise _error(f"{given.kv_connector} needs shared_storage_path in kv_connector_extra_config")
    return {"kv_offloading_path": path}


def _bytes(given: KVTransferFields, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise _error(f"{given.kv_connector}: {value!r} is not a number of bytes")
    return float(value)


def _error(message: str) -> ConfigError:
    return ConfigError(
        f"kv_transfer_config: {message}",
        hint="use --kv-offloading-size GiB, and --kv-offloading-path DIR for files; docs/kv-offloading.md",
    )
