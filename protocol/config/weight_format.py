"""Data type and quantization of the weights, from the checkpoint, `--dtype` and `--quantization`."""

from collections.abc import Mapping
from typing import Any

from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.config.model import DtypeChoice, DtypeName, QuantizationChoice, QuantizationName
from octavo.protocol.errors import ConfigError

_ALIASES: Mapping[str, QuantizationName] = {
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "awq": "awq",
    "awq_marlin": "awq",
    "compressed-tensors": "compressed-tensors",
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "mxfp4": "mxfp4",
    "modelopt": "modelopt",
    "modelopt_fp4": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "modelopt_mixed": "modelopt",
    "auto-round": "auto-round",
    "intel/auto-round": "auto-round",
    "quark": "quark",
}
"""Names of the formats in vLLM and config.json. Marlin is a vLLM kernel for the same weights."""
QUANTIZED_WHILE_LOADING = ("w8a8", "int8", "int4", "fp8", "bitsandbytes")
"""Formats to which an unquantized checkpoint can be converted."""
_DTYPE_ALIASES: dict[str, DtypeName] = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float32": "float32",
    "float": "float32",
}


def resolve_dtype(requested: DtypeChoice, facts: ModelFacts) -> DtypeName:
    """Return the data type of weights and activations."""
    if requested != "auto":
        return _DTYPE_ALIASES[requested]
    checkpoint = _DTYPE_ALIASES[facts.checkpoint_dtype]
    return "bfloat16" if checkpoint == "float32" else checkpoint


def checkpoint_quantization(facts: ModelFacts) -> QuantizationName | None:
    """Return the format of a checkpoint's weights. Return None if they are not quantized.

    Raises:
        ConfigError: octavo does not support the format.
    """
    if facts.load_format == "gguf":
        return "gguf"
    section = facts.hf_config.get("quantization_config")
    if not section:
        return None
    method = section.get("quant_method") if isinstance(section, Mapping) else section
    if method is None and (section.get("load_in_4bit") or section.get("load_in_8bit")):
        method = "bitsandbytes"
    name = _ALIASES.get(str(method))
    if name is None or not isinstance(section, Mapping):
        raise ConfigError(
            f"the checkpoint is quantized ({method}), which is not supported",
            hint=f"use the model's original checkpoint, a GGUF of it, or one of {', '.join(sorted(set(_ALIASES)))}",
        )
    if facts.load_format not in ("safetensors", "dummy"):
        raise ConfigError(
            f"the checkpoint is quantized ({method}), and its weights are {facts.load_format}",
            hint="quantized weights are read from safetensors files",
        )
    return name


_CACHE_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def resolve_quantization(requested: QuantizationChoice | None, facts: ModelFacts, dtype: DtypeName) -> QuantizationName:
    """Return the weight format that matrix products use.

    Args:
        requested: `--quantization`.
        facts: facts of the model.
        dtype: data type of the activations. With float32, users want the checkpoint's weights as exact as possible.

    Raises:
        ConfigError: the checkpoint has another format.
    """
    own = checkpoint_quantization(facts)
    if requested is None:
        return "none" if own is None or dtype == "float32" else own
    if requested in ("none", "w8a8", "int8", "int4"):
        return requested
    wanted = _ALIASES.get(requested)
    if requested == own or (wanted is not None and wanted == own):
        return own
    if own is None and wanted is not None and wanted in QUANTIZED_WHILE_LOADING:
        return wanted
    if requested == "gguf":
        raise ConfigError(
            f"--quantization gguf, but the weights are {facts.load_format}",
            hint="use w8a8, int8 or int4, or name a .gguf file",
        )
    actual = f"quantized otherwise ({own})" if own else "not quantized"
    choices = f"one of {', '.join(QUANTIZED_WHILE_LOADING)}, which quantize while loading"
    raise ConfigError(
        f"--quantization {requested}, but the checkpoint is {actual}",
        hint="leave it out to use the format of the checkpoint" if own else f"use {choices}, or a quantized checkpoint",
    )


def cache_scheme(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the quantization of the KV cache in the form of `kv_cache_scheme`. Return an empty mapping if it is not
    quantized.

    Args:
        section: `quantization_config` of config.json. ModelOpt names an algorithm, AutoFP8 writes "static". Quark names
            the layers whose outputs have scales, and how these are quantized.

    Raises:
        ConfigError: Quark's section does not say how they are quantized, or the layers differ.
    """
    scheme = section.get("kv_cache_scheme") or section.get("kv_cache_quant_algo") or {}
    if isinstance(scheme, str):
        return {"num_bits": 8, "type": "float"} if scheme.upper() in ("FP8", "STATIC") else {"type": scheme}
    export = section.get("export")
    if isinstance(export, Mapping) and (layers := export.get("kv_cache_group")):
        outputs = _outputs(section.get("layer_quant_config"), layers)
        if (outputs.get("dtype"), outputs.get("qscheme")) == ("fp8_e4m3", "per_tensor"):
            return {"num_bits": 8, "type": "float", "dynamic": bool(outputs.get("is_dynamic"))}
        return {"type": outputs.get("dtype"), "strategy": outputs.get("qscheme")}
    return scheme if isinstance(scheme, Mapping) else {"type": scheme}


def _outputs(of_layers: Any, layers: Any) -> Mapping[str, Any]:
    """Return `output_tensors` in `layer_quant_config`, which the layers in `kv_cache_group` share.

    Raises:
        ConfigError: a layer has none, or differs from the first.
    """
    field = "config.json: 'kv_cache_group' in 'export' of 'quantization_config'"
    if not isinstance(layers, list) or not all(isinstance(layer, str) for layer in layers):
        raise ConfigError(f"{field} is {layers!r}; expected names")
    found: dict[str, Mapping[str, Any]] = {}
    for layer in layers:
        own = of_layers.get(layer) if isinstance(of_layers, Mapping) else None
        outputs = own.get("output_tensors") if isinstance(own, Mapping) else None
        if not isinstance(outputs, Mapping):
            raise ConfigError(
                f"{field} names {layer!r}, and 'layer_quant_config' has no 'output_tensors' of it",
                hint="use the config.json that Quark wrote, or choose another type of cache with --kv-cache-dtype",
            )
        found[layer] = outputs
    first = found[layers[0]]
    for layer, outputs in found.items():
        for key in ("dtype", "qscheme", "is_dynamic"):
            if outputs.get(key) != first.get(key):
                raise ConfigError(
                    f"{field} mixes caches: {key!r} of 'output_tensors' is {first.get(key)!r} for {layers[0]!r}, and "
                    f"{outputs.get(key)!r} for {layer!r}",
                    hint="all layers have one type of cache: choose it with --kv-cache-dtype",
                )
    return first


def asks_for_float8_cache(facts: ModelFacts) -> bool:
    """Return whether the checkpoint has scales for an 8-bit float KV cache (`kv_cache_scheme`).

    Raises:
        ConfigError: it requires another quantized cache.
    """
    section = facts.hf_config.get("quantization_config")
    scheme = cache_scheme(section) if isinstance(section, Mapping) else None
    if not scheme:
        return False
    found = {name: scheme.get(name, usual) for name, usual in _CACHE_SCHEME.items()}
    if found != _CACHE_SCHEME:
        raise ConfigError(
            f"config.json: 'kv_cache_scheme' in 'quantization_config' asks for {found}; of quantized caches with "
            f"scales octavo has {_CACHE_SCHEME}",
            hint="choose the type of the cache with --kv-cache-dtype; its scales are not read then",
        )
    return True
