"""Reads the scales of cached keys and values from a checkpoint. Reads nothing else."""

import math
import re
from collections.abc import Container
from pathlib import Path

from safetensors import safe_open

from octavo.protocol.config import ModelFacts
from octavo.protocol.config.weight_format import cache_scheme
from octavo.protocol.errors import ConfigError
from octavo.protocol.weight_files import weight_files

CacheScales = dict[int, tuple[float, float]]
"""Factors of stored keys and values, by layer."""

_NAME = re.compile(
    r"(?:^|\.)layers\.(\d+)\.(?:self_attn|attention)\."
    r"(?:k_proj\.|v_proj\.|attn\.|qkv_proj\.)?(k_scale|v_scale|kv_scale|output_scale)$"
)
"""compressed-tensors and AutoFP8 have `self_attn.k_scale`, or `kv_scale` for both; ModelOpt `k_proj.k_scale`; older
files `k_proj.output_scale`."""
_FIELD = "config.json: 'kv_cache_scheme' in 'quantization_config'"


def read_cache_scales(facts: ModelFacts, layers: Container[int]) -> CacheScales:
    """Return the scales by layer; layers without scales are missing.

    Raises:
        ConfigError: a scale is not a positive number, a layer has only one of two scales, or the configuration promises
            scales that the files do not have.
    """
    section = facts.hf_config.get("quantization_config") or {}
    scheme = cache_scheme(section)
    if scheme.get("type", "float") != "float":
        return {}  # the user chose another cache type than the checkpoint's
    found: dict[int, dict[str, float]] = {}
    if facts.load_format == "safetensors":
        for path in weight_files(Path(facts.model_path), "safetensors").files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    if (match := _NAME.search(name)) and int(match[1]) in layers:
                        scales = found.setdefault(int(match[1]), {})
                        scales |= _of(name, match[2], file.get_tensor(name).float().max().item())
    for layer, scales in found.items():
        if set(scales) != {"k", "v"}:
            raise ConfigError(
                f"layer {layer} has a scale of {'keys' if 'k' in scales else 'values'} in the cache, and no other",
                hint="choose another type with --kv-cache-dtype",
            )
    # ModelOpt leaves out scales of 1.
    if scheme and not found and not str(section.get("quant_method")).startswith("modelopt"):
        raise ConfigError(
            f"{_FIELD} promises scales of the cache, and the files have none",
            hint="choose a type without scales, with --kv-cache-dtype auto and a config.json without this field",
        )
    return {layer: (scales["k"], scales["v"]) for layer, scales in found.items()}


def _of(name: str, kind: str, value: float) -> dict[str, float]:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(
            f"the scale {name} is {value}", hint="the file is damaged, or the model was not calibrated to its end"
        )
    if kind == "kv_scale":
        return {"k": value, "v": value}
    if kind == "output_scale":
        return {"k" if ".k_proj." in name else "v": value}
    return {kind[0]: value}
