"""torchao as transformers saves it to safetensors: the tensors of a subclass, whose type is in the file's metadata.

_weight_qdata       int8 (outputs, inputs) (Int8Tensor, IntxUnpackedToInt8Tensor), or float8_e4m3fn (Float8Tensor)
_weight_scale       of outputs, groups or the tensor
_weight_zero_point  int8, of the same shape

value = scale * (level - zero)
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.linear.quantized import QuantizedWeight, RowType
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional
from octavo.worker_proc.weights.quantized.fp8 import float8_matrix, spread
from octavo.worker_proc.weights.quantized.layout import HEAD, Layout, is_listed
from octavo.worker_proc.weights.quantized.matrix import StoredMatrix, require, zero_of_groups

_PREFIX = "_weight_"


class TorchAo:
    """See `octavo.worker_proc.weights.quantized.assembly.Format`."""

    markers: tuple[str, ...] = (f"{_PREFIX}qdata",)
    parts: tuple[str, ...] = (f"{_PREFIX}qdata", f"{_PREFIX}scale", f"{_PREFIX}zero_point", f"{_PREFIX}act_pre_scale")

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
        config = CheckedConfig(config)
        # How each tensor was quantized is in the metadata.
        ignore(config, "quant_method", "quant_type_kwargs")
        self._skipped: list[str] = optional(config, "modules_to_not_convert", [])
        self._type = str(config.get("quant_type"))
        ignore(config, "include_input_output_embeddings", "untie_embedding_weights")
        config.reject_unread("torchao", section="quantization_config")
        self._metadata = metadata

    def layout(self, layer: str) -> Layout | None:
        """Return what a layer takes in memory."""
        if is_listed(layer, [HEAD, *self._skipped]):
            return None
        rows: RowType | None = "int8_token" if "DynamicActivation" in self._type else None
        return Layout(8, None, "e4m3") if "Float8" in self._type else Layout(8, None, rows=rows)

    def matrix(self, layer: str, tensors: Mapping[str, Tensor]) -> StoredMatrix:
        """Return the matrix of a layer."""
        described = json.loads(self._metadata.get(f"{layer}.weight", "{}"))
        kind, fields = described.get("_type"), described.get("_data", {})
        if f"{_PREFIX}act_pre_scale" in tensors:
            raise ConfigError(f"{f'{layer}.{_PREFIX}act_pre_scale'!r}: factors of activations are not supported")
        codes, scale = require(tensors, layer, f"{_PREFIX}qdata"), require(tensors, layer, f"{_PREFIX}scale")
        match kind:
            case "Float8Tensor":
                rows: RowType | None = "fp8_token" if fields.get("act_quant_kwargs") else None
                return float8_matrix(layer, codes, scale, _block(fields), rows, None)
            case "Int8Tensor" | "IntxUnpackedToInt8Tensor":
                return _int8_matrix(layer, codes, scale, tensors.get(f"{_PREFIX}zero_point"), fields)
        raise ConfigError(
            f"{f'{layer}.weight'!r} is a {kind} of torchao, a layout that is not supported",
            hint="use Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, IntxWeightOnlyConfig, or a float8 "
            "config",
        )


def _block(fields: Mapping[str, Any]) -> tuple[int, int] | None:
    outputs, inputs = (int(length) for length in fields["block_size"])
    return (outputs, inputs) if outputs > 1 else None


def _int8_matrix(
    layer: str, codes: Tensor, scale: Tensor, zeros: Tensor | None, fields: Mapping[str, Any]
) -> StoredMatrix:
    if codes.dtype != torch.int8 or codes.ndim != 2:
        raise ConfigError(f"{f'{layer}.{_PREFIX}qdata'!r} is of type {codes.dtype}; expected int8")
    num_outputs, num_inputs = codes.shape
    is_quantizing = bool(fields.get("act_quant_kwargs"))
    if fields.get("activation_quantization"):  # asymmetric: rows in 16 bits are more precise
        is_quantizing = False

    def decode() -> QuantizedWeight:
        scale_OG, _ = spread(scale, (num_outputs, num_inputs), None)
        offset, zero_OG = 128, None
        if zeros is not None:
            zeros_OG = spread(zeros.float(), (num_outputs, num_inputs), None)[0] + 128
            offset, zero_OG = zero_of_groups(zeros_OG.to(torch.uint8), 8)
        return QuantizedWeight(
            codes.contiguous().view(torch.uint8) ^ 128,
            scale_OG,
            None,
            offset,
            8,
            int(fields["block_size"][-1]),
            zero_OG=zero_OG,
            row_type="int8_token" if is_quantizing else None,
        )

    return StoredMatrix(layer, (num_outputs, num_inputs), decode)
