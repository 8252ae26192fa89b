"""bitsandbytes as transformers saves it: NormalFloat and 4-bit floats (Dettmers et al. 2023), and LLM.int8().

weight                 uint8 (outputs * inputs / 2, 1): codes of the matrix row by row, the first in the high half
weight.absmax          float32, of blocks of the flattened matrix; or uint8, quantized again
weight.nested_absmax, weight.nested_quant_map  of the second quantization of absmax
weight.quant_state.bitsandbytes__nf4 (or fp4)  JSON: the block sizes, and the shape

weight  int8 (outputs, inputs)
SCB     float32 (outputs,): value = weight * SCB / 127
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.linear.codebooks import Codebook, codebook
from octavo.kernels.linear.quantized import GROUP_MULTIPLE, QuantizedWeight
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional
from octavo.worker_proc.weights.quantized.layer_rules import HEAD, is_listed
from octavo.worker_proc.weights.quantized.layout import Layout
from octavo.worker_proc.weights.quantized.matrix import StoredMatrix, require

_HARMLESS = """
quant_method _load_in_4bit _load_in_8bit load_in_4bit load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_storage
bnb_4bit_quant_type bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload llm_int8_skip_modules llm_int8_threshold
"""
"""Settings that the tensors repeat, or that select how outlier activations are computed: here all have 16 bits."""
_STATE = "weight.quant_state.bitsandbytes__"
_KINDS: tuple[Codebook, ...] = ("nf4", "fp4")


class BitsAndBytes:
    """See `octavo.worker_proc.weights.quantized.assembly.Format`."""

    markers: tuple[str, ...] = (*(f"{_STATE}{kind}" for kind in _KINDS), "SCB")
    parts: tuple[str, ...] = (
        *("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
        *("SCB", "weight_format", *(f"{_STATE}{kind}" for kind in _KINDS)),
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        config = CheckedConfig(config, "quantization_config")
        ignore(config, *_HARMLESS.split())
        if optional(config, "llm_int8_has_fp16_weight", False):
            raise ConfigError("config.json: 'llm_int8_has_fp16_weight' in 'quantization_config' is not supported")
        self._skipped: list[str] = optional(config, "llm_int8_skip_modules", [])
        self._is_int8 = optional(config, "load_in_8bit", False)
        self._kind: Codebook = "nf4" if config.get("bnb_4bit_quant_type") == "nf4" else "fp4"
        config.reject_unread("bitsandbytes")

    def layout(self, layer: str) -> Layout | None:
        """Return the memory layout of a layer."""
        if is_listed(layer, [HEAD, *self._skipped]):
            return None
        return Layout(8, None) if self._is_int8 else Layout(4, 64, self._kind)

    def matrix(self, layer: str, tensors: Mapping[str, Tensor]) -> StoredMatrix:
        """Return the matrix of a layer."""
        if "SCB" in tensors:
            return _int8_matrix(layer, require(tensors, layer, "weight", num_dims=2), tensors)
        kind = next(kind for kind in _KINDS if f"{_STATE}{kind}" in tensors)
        return _float4_matrix(layer, tensors, kind)


def _int8_matrix(layer: str, weight_OI: Tensor, tensors: Mapping[str, Tensor]) -> StoredMatrix:
    layout = tensors.get("weight_format")
    if layout is not None and int(layout) != 0:
        raise ConfigError(f"{f'{layer}.weight_format'!r} is {int(layout)}: only 0, rows, is supported")
    num_outputs, num_inputs = weight_OI.shape

    def decode() -> QuantizedWeight:
        levels_OI = weight_OI.contiguous().view(torch.uint8) ^ 128
        scale_OG = (tensors["SCB"].float() / 127).view(-1, 1)
        return QuantizedWeight(levels_OI, scale_OG, None, 128, 8, num_inputs)

    return StoredMatrix(layer, (num_outputs, num_inputs), decode)


def _float4_matrix(layer: str, tensors: Mapping[str, Tensor], kind: Codebook) -> StoredMatrix:
    state = json.loads(bytes(tensors[f"{_STATE}{kind}"].tolist()))
    shape, block_size = tuple(state["shape"]), int(state["blocksize"])
    weight, absmax = require(tensors, layer, "weight"), require(tensors, layer, "weight.absmax")
    group_size = math.gcd(block_size, shape[-1])
    if len(shape) != 2 or (group_size % GROUP_MULTIPLE and group_size != shape[1]):
        raise ConfigError(
            f"{layer!r} of shape {shape} is quantized in blocks of {block_size}, which lie in several rows",
            hint="use the unquantized checkpoint",
        )
    if not torch.allclose(require(tensors, layer, "weight.quant_map").float(), codebook(kind), rtol=0.0, atol=1e-6):
        raise ConfigError(f"{f'{layer}.weight.quant_map'!r} does not hold the values of {kind}")

    def decode() -> QuantizedWeight:
        packed = weight.contiguous().view(torch.uint8).view(-1)
        codes_OI = torch.stack((packed >> 4, packed & 15), -1).view(-1)[: math.prod(shape)].view(shape)
        blocks = absmax.float() if absmax.dtype != torch.uint8 else _nested(layer, absmax, tensors, state)
        scale_OG = blocks.repeat_interleave(block_size // group_size)[: math.prod(shape) // group_size]
        return QuantizedWeight(codes_OI, scale_OG.view(shape[0], -1), None, 0, 4, group_size, codebook=kind)

    return StoredMatrix(layer, (shape[0], shape[1]), decode)


def _nested(layer: str, absmax: Tensor, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor:
    """Return the largest absolute values of blocks, which are quantized themselves."""
    quant_map = require(tensors, layer, "weight.nested_quant_map").float()
    scales = require(tensors, layer, "weight.nested_absmax").float()
    blocks = quant_map[absmax.int()] * scales.repeat_interleave(int(state["nested_blocksize"]))[: len(absmax)]
    return blocks + float(state["nested_offset"])
