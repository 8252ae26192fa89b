"""Resolves the data type of the KV cache and the source of its scales, from flags and checkpoint."""

from octavo.protocol.config.engine import DeviceName, EngineConfig, KVCacheDtypeName
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.config.model import DtypeName
from octavo.protocol.config.weight_format import asks_for_float8_cache
from octavo.protocol.errors import ConfigError


def resolve_kv_cache_dtype(
    config: EngineConfig, facts: ModelFacts, dtype: DtypeName, device: DeviceName
) -> KVCacheDtypeName:
    """Return the data type of the cache.

    Raises:
        ConfigError: the device does not support the type, or `--calculate-kv-scales` contradicts it or the checkpoint.
    """
    chosen = _chosen(config, facts, dtype, device)
    if chosen in ("int8", "fp8") and device == "cpu":
        require_native(config, f"--kv-cache-dtype {chosen}", device)
    if config.cache.calculate_kv_scales:
        _check_measured_scales(config, facts, chosen)
    return chosen


def _chosen(config: EngineConfig, facts: ModelFacts, dtype: DtypeName, device: DeviceName) -> KVCacheDtypeName:
    requested = config.cache.kv_cache_dtype
    if requested == "auto" and asks_for_float8_cache(facts):
        return "fp8"
    if requested == "auto" or requested == dtype:
        return dtype
    if requested == "fp8_e5m2":
        raise ConfigError(
            "kv_cache_dtype fp8_e5m2: an 8-bit float KV cache has three mantissa bits here",
            hint="use --kv-cache-dtype fp8 (fp8_e4m3), which has scales, or int8",
        )
    if requested in ("fp8", "fp8_e4m3"):
        return "fp8"
    if requested == "int8":
        return requested
    raise ConfigError(
        f"kv_cache_dtype {requested} with a model of {dtype} on {device}",
        hint=f"use --kv-cache-dtype auto, which is {dtype} here, fp8 or int8",
    )


def _check_measured_scales(config: EngineConfig, facts: ModelFacts, dtype: KVCacheDtypeName) -> None:
    def refuse(reason: str, hint: str) -> ConfigError:
        return ConfigError(f"--calculate-kv-scales: {reason}", hint=hint)

    if dtype != "fp8":
        reason = "each int8 key and value has a scale of its own" if dtype == "int8" else f"{dtype} has no scales"
        raise refuse(f"{reason} in the cache", "use --kv-cache-dtype fp8, or leave it out")
    if asks_for_float8_cache(facts):
        raise refuse(
            "the checkpoint has scales for keys and values ('kv_cache_scheme' in config.json)",
            "leave it out to use them",
        )
    if config.parallel.is_lock_step:
        raise refuse(
            "engines that divide the experts do not start at the same time, and no step runs on one of them alone",
            "leave out --enable-expert-parallel, or use --kv-cache-dtype auto",
        )


def require_native(config: EngineConfig, flag: str, device: DeviceName) -> None:
    """Raise if a setting needs the native CPU kernels, but the configuration excludes them.

    Raises:
        ConfigError: the configuration excludes them.
    """
    if device != "cpu":
        raise ConfigError(
            f"{flag} needs the native kernels, which run on the CPU only", hint=f"use --device cpu, or leave out {flag}"
        )
    if config.device.cpu_kernels == "torch":
        raise ConfigError(
            f"{flag} needs the native kernels, which --cpu-kernels torch disables",
            hint=f"leave out --cpu-kernels torch or {flag}",
        )
