"""Checkpoints of AMD's Quark, which selects the quantization scheme of a layer by its name or class.

weight        float8_e4m3fn or int8 (outputs, inputs); MXFP4: uint8 (outputs, inputs / 2), two 4-bit floats per byte
weight_scale  one per tensor, output or block; MXFP4: uint8 (outputs, inputs / 32), powers of two (e8m0)
input_scale   one number, if activations have a static scale
weight_zero_point, bias_scale and so on: parts of asymmetric weights, which are not supported

value = scale * code
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.linear.quantized import QuantizedWeight, RowType
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional, reject_unless, required
from octavo.worker_proc.weights.quantized.float4 import float4_matrix, float_scale
from octavo.worker_proc.weights.quantized.fp8 import float8_matrix, spread, static_scale
from octavo.worker_proc.weights.quantized.layer_rules import first_match, is_listed
from octavo.worker_proc.weights.quantized.layout import Layout, block_of
from octavo.worker_proc.weights.quantized.matrix import StoredMatrix, require

logger = logging.getLogger(__name__)

_SECTION = "quantization_config"
_UNUSED = """
enable_buffer_reuse is_scale_quant max_input_numel mx_element_dtype observer_cls round_method
scale_calculation_mode scale_type zero_point_type
"""
"""Settings that only the quantizer used, and settings that the tensors show, too."""


@dataclass(frozen=True, slots=True)
class _Scheme:
    """The quantization scheme of a group of layers."""

    dtype: str
    group_size: int | None
    block: tuple[int, int] | None
    rows: RowType | None


class Quark:
    """See `octavo.worker_proc.weights.quantized.assembly.Format`."""

    markers: tuple[str, ...] = ("weight_scale",)
    parts: tuple[str, ...] = ("weight", "weight_scale", "weight_zero_point", "input_scale", "input_zero_point")

    def __init__(self, config: Mapping[str, Any]) -> None:
        config = CheckedConfig(config, _SECTION)
        # `algo_config` describes how the quantizer chose the weights.
        ignore(config, "quant_method", "quant_mode", "version", "algo_config")
        self._skipped: list[str] = optional(config, "exclude", [])
        for key in ("softmax_quant_spec", "kv_cache_post_rope"):
            if config.get(key):
                raise _refused(key, repr(config[key]))
        keys_and_values = _check_export(CheckedConfig(required(config, "export", dict), "export"))
        if config.get("kv_cache_quant_config") and not keys_and_values:
            raise ConfigError(
                f"config.json: 'kv_cache_quant_config' in {_SECTION!r} asks for a quantized cache, and "
                "'kv_cache_group' in 'export' names no layers whose outputs have its scales",
                hint="name them there, such as *k_proj and *v_proj, or remove 'kv_cache_quant_config'",
            )
        self._of_all = _scheme(required(config, "global_quant_config", dict), "global_quant_config")
        of_classes: dict[str, Any] = optional(config, "layer_type_quant_config", {})
        if of_classes:
            raise _refused("layer_type_quant_config", "settings of classes of layers")
        of_layers: dict[str, Any] = optional(config, "layer_quant_config", {})
        self._of_layers = {
            pattern: _scheme(settings, f"layer_quant_config of {pattern}", is_cached=pattern in keys_and_values)
            for pattern, settings in of_layers.items()
        }
        config.reject_unread("quark")

    def _scheme_of(self, layer: str) -> _Scheme | None:
        """Return the scheme of the first pattern that matches a layer's name, or else the scheme of all layers; `None`
        if the layer is not quantized."""
        return first_match(self._of_layers, layer, lambda pattern, name: fnmatch(name, pattern), self._of_all)

    def layout(self, layer: str) -> Layout | None:
        """Return the memory layout of a layer."""
        if is_listed(layer, self._skipped) or (scheme := self._scheme_of(layer)) is None:
            return None
        if scheme.dtype == "int8":
            return Layout(8, None, rows=scheme.rows)
        if scheme.dtype == "fp4":
            return Layout(4, scheme.group_size, "e2m1")
        return Layout(8, scheme.block[1] if scheme.block else None, "e4m3")

    def matrix(self, layer: str, tensors: Mapping[str, Tensor]) -> StoredMatrix:
        """Return the matrix of a layer."""
        scheme = self._scheme_of(layer)
        if scheme is None:
            raise ConfigError(
                f"the checkpoint holds {layer!r} quantized, and {_SECTION!r} of config.json says it is not",
                hint="check that config.json belongs to the checkpoint",
            )
        for part in ("weight_zero_point", "input_zero_point") if scheme.rows else ("weight_zero_point",):
            if part in tensors and tensors[part].float().any():
                raise ConfigError(
                    f"the checkpoint holds {f'{layer}.{part}'!r} with numbers other than 0, which are not supported",
                    hint="export the model with symmetric weights and activations",
                )
        weight, scale = require(tensors, layer, "weight"), tensors["weight_scale"]
        row_scale = static_scale(tensors, layer) if scheme.rows in ("int8_tensor", "fp8_tensor") else None
        if scheme.dtype == "fp4":
            return float4_matrix(layer, weight, scale)
        if scheme.dtype == "fp8_e4m3":
            return float8_matrix(layer, weight, float_scale(scale), scheme.block, scheme.rows, row_scale)
        return _int8_matrix(layer, weight, scale, scheme.rows, row_scale)


def _refused(key: str, what: str) -> ConfigError:
    return ConfigError(
        f"config.json: {key!r} in {_SECTION!r} asks for {what}, which is not supported",
        hint="of Quark's formats octavo reads fp8 by tensor, channel and block, int8 by tensor and channel, and MXFP4",
    )


def _check_export(export: CheckedConfig) -> list[str]:
    """Return the patterns of layers that compute keys or values. The scales of their outputs belong to the cache."""
    # `pack_method` is the order of packed 4-bit integers, which are not supported.
    ignore(export, "min_kv_scale", "pack_method", "weight_merge_groups")
    reject_unless(export, "weight_format", ("real_quantized", None))
    keys_and_values: list[str] = optional(export, "kv_cache_group", [])
    export.reject_unread("quark")
    return keys_and_values


def _scheme(settings: Any, where: str, *, is_cached: bool = False) -> _Scheme | None:
    """Return a scheme; `None` if its layers are not quantized. `is_cached`: their outputs are keys or values."""
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise _refused(where, repr(settings))
    config = CheckedConfig(settings, where)
    ignore(config, "target_device")
    if config.get("bias") is not None:
        raise _refused(where, "quantized biases")
    if config.get("output_tensors") is not None and not is_cached:
        raise _refused(where, "quantized outputs")
    if config.get("weight") is None:
        config.reject_unread("quark")
        return None
    weight = _tensor_config(config["weight"], f"weight in {where}")
    kind, strategy = weight["dtype"], weight["qscheme"]
    block, group_size = _block(weight), weight.get("group_size")
    ignore(weight, "ch_axis")
    if strategy == "per_channel":
        reject_unless(weight, "ch_axis", (0, None))  # the outputs
    reject_unless(weight, "symmetric", (True, None))
    reject_unless(weight, "is_dynamic", (False, None))
    if kind == "fp4":
        is_supported = strategy == "per_group" and group_size == 32 and weight.get("scale_format") == "e8m0"
    elif strategy == "per_block":
        is_supported = kind == "fp8_e4m3" and block is not None
    else:
        is_supported = kind in ("fp8_e4m3", "int8") and strategy in ("per_tensor", "per_channel")
    if not is_supported:
        raise _refused(where, f"weights of type {kind!r} with {strategy!r} scales")
    ignore(weight, "scale_format")
    weight.reject_unread("quark")
    block = block if strategy == "per_block" else None
    rows = _rows(config.get("input_tensors"), f"input_tensors in {where}", block)
    scheme = _Scheme(kind, group_size, block, rows)
    config.reject_unread("quark")
    return scheme


def _tensor_config(section: Any, where: str) -> CheckedConfig:
    """Return the settings of a tensor's quantization."""
    if isinstance(section, list) and len(section) == 1:
        section = section[0]
    if not isinstance(section, Mapping):
        raise _refused(where, "several steps of quantization (a list)")
    config = CheckedConfig(section, where)
    ignore(config, *_UNUSED.split())
    for key in ("dtype", "qscheme"):
        required(config, key, str)
    return config


def _block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the two lengths of a block; `None` if `block_size` is missing, or one number, as in other schemes."""
    return None if type(config.get("block_size")) is int else block_of(config, "block_size")


def _rows(section: Any, where: str, block: tuple[int, int] | None) -> RowType | None:
    """Return the quantization of rows; `None` if the checkpoint requires none, or one that is not supported (which is
    logged).

    `block`: block of the weight. Groups of rows must have as many inputs as the block.
    """
    if section is None:
        return None
    config = _tensor_config(section, where)
    kind, strategy, is_dynamic = config["dtype"], config["qscheme"], bool(config.get("is_dynamic"))
    group_size, block_of_rows = config.get("group_size"), _block(config)
    ignore(config, "ch_axis", "scale_format")
    if kind not in ("fp8_e4m3", "int8") or not optional(config, "symmetric", True):
        logger.warning(
            "the checkpoint asks for activations of type %s%s, which octavo does not have: they keep the type "
            "of --dtype",
            *(kind, " with zero points" if config.get("symmetric") is False else ""),
        )
        return None
    if not is_dynamic and strategy != "per_tensor":
        raise _refused(where, f"static activations with {strategy!r} scales")
    if strategy == "per_channel":
        # The axis of tokens is 0 of two dimensions, or 1 of three, as in Quark's own recipes.
        reject_unless(config, "ch_axis", (0, 1, None))
    elif strategy == "per_tensor" and is_dynamic:
        logger.info("the checkpoint asks for one scale of the activations of a batch: each token has its own instead")
    elif strategy in ("per_group", "per_block"):
        inputs = group_size if strategy == "per_group" else block_of_rows and block_of_rows[0] == 1 and block_of_rows[1]
        if kind != "fp8_e4m3" or block is None or inputs != block[1]:
            logger.warning(
                "the checkpoint asks for activations with %s scales, which octavo has for groups as long as the blocks "
                "of an fp8 weight alone: they keep the type of --dtype",
                strategy,
            )
            return None
    elif strategy != "per_tensor":
        raise _refused(where, f"activations with {strategy!r} scales")
    config.reject_unread("quark")
    if kind == "int8":
        return "int8_token" if is_dynamic else "int8_tensor"
    return "fp8_token" if is_dynamic else "fp8_tensor"


def _int8_matrix(
    layer: str, weight: Tensor, scale: Tensor, rows: RowType | None, row_scale: float | None
) -> StoredMatrix:
    if weight.dtype != torch.int8 or weight.ndim != 2:
        raise ConfigError(f"{f'{layer}.weight'!r} is of type {weight.dtype}; expected int8")
    num_outputs, num_inputs = weight.shape

    def decode() -> QuantizedWeight:
        scale_OG, group_size = spread(scale, (num_outputs, num_inputs), None)
        levels_OI = weight.contiguous().view(torch.uint8) ^ 128
        return QuantizedWeight(levels_OI, scale_OG, None, 128, 8, group_size, row_type=rows, row_scale=row_scale)

    return StoredMatrix(layer, (num_outputs, num_inputs), decode)
