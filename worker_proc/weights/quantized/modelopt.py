"""NVIDIA's ModelOpt (Model Optimizer), by `quantization_config` of config.json or by hf_quant_config.json.

FP8                        weight float8_e4m3fn, weight_scale and input_scale one number each
FP8_PER_CHANNEL_PER_TOKEN  weight_scale of outputs
FP8_PB_WO                  weight_scale of blocks of 128 x 128, shape (blocks, 1, blocks, 1)
MXFP8                      weight_scale uint8 (outputs, inputs / 32), powers of two (e8m0)
NVFP4, W4A16_NVFP4         weight uint8 (outputs, inputs / 2), weight_scale float8_e4m3fn (outputs, inputs / 16), and
                           weight_scale_2 one number: value = code * weight_scale * weight_scale_2

In MIXED_PRECISION each layer has one of these formats; its tensors show which.

Models whose experts are one batched product (Llama 4) have them in stacks, with inputs before outputs:
experts.gate_up_proj                  FP8 (experts, inputs, outputs), or NVFP4 uint8 (experts, inputs / 2, outputs)
experts.gate_up_proj_weight_scale     FP8 one number, NVFP4 (experts, inputs / 16, outputs)
experts.gate_up_proj_weight_scale_2, experts.gate_up_proj_input_scale     one number
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.linear.quantized import RowType
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional, reject_unless, required
from octavo.worker_proc.weights.quantized.float4 import float4_matrix, float_scale
from octavo.worker_proc.weights.quantized.fp8 import float8_matrix, row_type, static_scale
from octavo.worker_proc.weights.quantized.layer_rules import is_listed
from octavo.worker_proc.weights.quantized.layout import Layout
from octavo.worker_proc.weights.quantized.matrix import StoredMatrix, StoredStack, require

logger = logging.getLogger(__name__)

_BLOCK = 128
_GROUP = 16
"""Number of inputs per scale in NVFP4."""
_LAYOUTS = {
    "FP8": Layout(8, None, "e4m3"),
    "FP8_PER_CHANNEL_PER_TOKEN": Layout(8, None, "e4m3"),
    "FP8_PB_WO": Layout(8, _BLOCK, "e4m3"),
    "MXFP8": Layout(8, 32, "e4m3"),
    "NVFP4": Layout(4, _GROUP, "e2m1"),
    "W4A16_NVFP4": Layout(4, _GROUP, "e2m1"),
}
"""Supported algorithms. Their names may be in lower case."""
_MIXED = "MIXED_PRECISION"
_STACK_SCALE = "_weight_scale"
_OWN_TENSORS = "use a checkpoint whose experts have tensors of their own (experts.0.gate_proj.weight, ...)"
_STACK_PARTS = {"": "weight"} | {
    f"_{part}": part for part in ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")
}
"""Parts of a stack, by the suffix of the stack's name."""


class ModelOpt:
    """See `octavo.worker_proc.weights.quantized.assembly.Format`."""

    markers: tuple[str, ...] = ("weight_scale",)
    parts: tuple[str, ...] = ("weight", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")

    def __init__(self, config: Mapping[str, Any]) -> None:
        config = CheckedConfig(config, "quantization_config")
        # `config_groups` repeats `quant_algo` for other readers; protocol/config/weight_format.py reads the cache's.
        ignore(config, "quant_method", "producer", "quant_library", "config_groups")
        ignore(config, "kv_cache_scheme", "kv_cache_quant_algo")
        self._skipped: list[str] = optional(config, "ignore", optional(config, "exclude_modules", []))
        self._algo = _checked(required(config, "quant_algo", str), allows_mixed=True)
        layers: dict[str, Any] = optional(config, "quantized_layers", {})
        self._algo_of = {layer: _algo_of(layer, settings) for layer, settings in layers.items()}
        if self._algo == _MIXED and not self._algo_of:
            raise ConfigError(
                f"config.json: 'quantized_layers' in 'quantization_config' is missing, which says what {_MIXED} mixes"
            )
        algos = [*self._algo_of.values()] if self._algo == _MIXED else [self._algo]
        reject_unless(config, "group_size", (*(_LAYOUTS[algo].group_size or 0 for algo in algos), None))
        if "NVFP4" in algos:
            logger.warning(
                "the checkpoint asks for activations of 4 bits, which octavo does not have: they keep the type "
                "of --dtype"
            )
        _check_scales(config, "quantization_config")
        config.reject_unread("modelopt")

    def layout(self, layer: str) -> Layout | None:
        """Return the memory layout of a layer."""
        if is_listed(layer, self._skipped):
            return None
        algo = self._algo_of.get(layer) if self._algo == _MIXED else self._algo
        return None if algo is None else _LAYOUTS[algo]

    def matrix(self, layer: str, tensors: Mapping[str, Tensor]) -> StoredMatrix:
        """Return the matrix of a layer."""
        weight, scale = require(tensors, layer, "weight"), tensors["weight_scale"]
        if "pre_quant_scale" in tensors:
            raise ConfigError(
                f"the checkpoint holds {f'{layer}.pre_quant_scale'!r}, scales of activations that are not supported",
                hint="use a checkpoint without AWQ or SmoothQuant",
            )
        if weight.dtype == torch.uint8:
            return float4_matrix(layer, weight, scale, factor=require(tensors, layer, "weight_scale_2"))
        if scale.dtype == torch.uint8:
            return float8_matrix(layer, weight, float_scale(scale), None, "fp8_token", None)
        num_blocks = tuple(-(-length // _BLOCK) for length in weight.shape)
        is_of_blocks = scale.ndim == 4
        if is_of_blocks:
            scale = scale[:, 0, :, 0]
        if scale.shape == num_blocks and (is_of_blocks or scale.numel() > 1):
            return float8_matrix(layer, weight, scale, (_BLOCK, _BLOCK), None, None)
        if scale.numel() not in (1, len(weight)):
            raise ConfigError(
                f"{f'{layer}.weight_scale'!r} has shape {tuple(scale.shape)}, and the weight {tuple(weight.shape)}; "
                f"expected one scale, one for each output, or those of blocks of {_BLOCK} x {_BLOCK}"
            )
        row_scale = static_scale(tensors, layer) if "input_scale" in tensors else None
        rows: RowType = row_type(row_scale)
        return float8_matrix(layer, weight, scale, None, rows, row_scale)

    def places_in_stacks(self, names: Collection[str]) -> dict[str, tuple[str, str]]:
        """Return the stack and the part of each tensor: scales of stacks have the stack's name."""
        stacks = {name.removesuffix(_STACK_SCALE) for name in names if name.endswith(_STACK_SCALE)}
        return {
            f"{stack}{end}": (stack, part)
            for stack in stacks & {*names}
            for end, part in _STACK_PARTS.items()
            if f"{stack}{end}" in names
        }

    def stack(self, name: str, tensors: Mapping[str, Tensor]) -> StoredStack:
        """Return the matrices of all experts of a layer."""
        weight_EIO, scale = require(tensors, name, "weight"), tensors["weight_scale"]
        is_float4 = weight_EIO.dtype == torch.uint8
        if not _is_stack(weight_EIO, scale):
            raise ConfigError(
                f"{name!r} of type {weight_EIO.dtype} has shape {tuple(weight_EIO.shape)}, and its scales "
                f"{tuple(scale.shape)}; expected experts of FP8 with one scale (experts, inputs, outputs), or of NVFP4 "
                f"(experts, inputs / 2, outputs) with scales (experts, inputs / {_GROUP}, outputs)",
                hint=_OWN_TENSORS,
            )
        num_experts, num_rows, num_outputs = weight_EIO.shape
        num_inputs = num_rows * (2 if is_float4 else 1)
        divided = {"weight", "weight_scale"} if is_float4 else {"weight"}  # among outputs
        for part in sorted(tensors.keys() - divided - {"pre_quant_scale"}):  # `matrix` refuses that one
            if tensors[part].numel() not in (1, num_experts):
                raise ConfigError(
                    f"{f'{name}_{part}'!r} has shape {tuple(tensors[part].shape)}; expected one number, or one for "
                    f"each of {num_experts} experts",
                    hint=_OWN_TENSORS,
                )

        def cut(expert: int, num_parts: int) -> list[StoredMatrix]:
            parts = []
            size = num_outputs // num_parts
            for start in range(0, num_outputs, size):
                own = {}
                for part, tensor in tensors.items():
                    if part in divided:
                        own[part] = tensor[expert, :, start : start + size].T.contiguous()
                    else:
                        own[part] = tensor if tensor.numel() == 1 else tensor.flatten()[expert]
                parts.append(self.matrix(f"{name}[{expert}]", own))
            return parts

        return StoredStack(name, num_experts, (num_outputs, num_inputs), cut, is_turned=True)


def _is_stack(weight_EIO: Tensor, scale: Tensor) -> bool:
    """Return whether a stack is FP8 or NVFP4, and its scales have the shape of these."""
    if weight_EIO.ndim != 3:
        return False
    num_experts, num_rows, num_outputs = weight_EIO.shape
    if weight_EIO.dtype == torch.uint8:
        return scale.shape == (num_experts, num_rows * 2 // _GROUP, num_outputs)
    return weight_EIO.dtype == torch.float8_e4m3fn and scale.numel() in (1, num_experts)


def _algo_of(layer: str, settings: Any) -> str:
    """Return the algorithm of one layer of a mixture."""
    section = f"{layer} in quantized_layers"
    if not isinstance(settings, Mapping):
        raise ConfigError(f"config.json: {section!r} of 'quantization_config' is {settings!r}; expected an object")
    config = CheckedConfig(settings, section)
    algo = _checked(required(config, "quant_algo", str), allows_mixed=False)
    reject_unless(config, "group_size", (_LAYOUTS[algo].group_size or 0, None))
    reject_unless(config, "weight_block_size", ([_BLOCK, _BLOCK], None) if algo == "FP8_PB_WO" else (None,))
    _check_scales(config, section)
    config.reject_unread("modelopt")
    return algo


def _check_scales(config: Mapping[str, Any], section: str) -> None:
    for key in ("has_zero_point", "pre_quant_scale"):
        if optional(config, key, False):
            raise ConfigError(f"config.json: {key!r} in {section!r} is not supported")


def _checked(algo: str, *, allows_mixed: bool) -> str:
    """Return the name of an algorithm in capitals.

    Raises:
        ConfigError: the algorithm is not supported.
    """
    known = [*_LAYOUTS, _MIXED] if allows_mixed else [*_LAYOUTS]
    if algo.upper() not in known:
        raise ConfigError(
            f"config.json: 'quant_algo' in 'quantization_config' is {algo!r}; only {', '.join(known)} are supported",
            hint="use the model's original checkpoint, or one of these",
        )
    return algo.upper()
