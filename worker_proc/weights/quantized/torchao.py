"""Checkpoints of torchao, saved by transformers as safetensors. The file's metadata has the tensor subclass of each.

_weight_qdata       int8 (outputs, inputs) (Int8Tensor, IntxUnpackedToInt8Tensor), or float8_e4m3fn (Float8Tensor)
_weight_scale       one per output, group or tensor
_weight_zero_point  int8, same shape as the scale
_weight_act_quant_scale  static scale of all activations, one number

value = scale * (level - zero)

Models of Transformers 5 have one parameter for all experts of a layer, such as `experts.gate_up_proj`. It is saved as
`experts._gate_up_proj_qdata` (experts, 2 * inner width, width) and so on.
"""

import json
import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.linear.quantized import QuantizedWeight, RowType
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional
from octavo.worker_proc.parallel.sharding import Shard
from octavo.worker_proc.weights.quantized.fp8 import float8_matrix, spread
from octavo.worker_proc.weights.quantized.layer_rules import HEAD, is_listed
from octavo.worker_proc.weights.quantized.layout import Layout
from octavo.worker_proc.weights.quantized.matrix import StoredMatrix, StoredStack, require, zero_of_groups

logger = logging.getLogger(__name__)

_PREFIX = "_weight_"
_PARTS = ("qdata", "scale", "zero_point", "act_pre_scale", "act_quant_scale", "act_quant_zero_point")


class TorchAo:
    """See `octavo.worker_proc.weights.quantized.assembly.Format`."""

    markers: tuple[str, ...] = (f"{_PREFIX}qdata",)
    parts: tuple[str, ...] = tuple(f"{_PREFIX}{part}" for part in _PARTS)

    def __init__(self, config: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
        config = CheckedConfig(config, "quantization_config")
        # The metadata has the settings of each tensor.
        ignore(config, "quant_method", "quant_type_kwargs")
        self._skipped: list[str] = optional(config, "modules_to_not_convert", [])
        self._type = str(config.get("quant_type"))
        ignore(config, "include_input_output_embeddings", "untie_embedding_weights")
        config.reject_unread("torchao")
        self._metadata = metadata

    def layout(self, layer: str) -> Layout | None:
        """Return the memory layout of a layer."""
        if is_listed(layer, [HEAD, *self._skipped]):
            return None
        rows: RowType | None = "int8_token" if "DynamicActivation" in self._type else None
        return Layout(8, None, "e4m3") if "Float8" in self._type else Layout(8, None, rows=rows)

    def matrix(self, layer: str, tensors: Mapping[str, Tensor]) -> StoredMatrix:
        """Return the matrix of a layer."""
        kind, fields = self._described(f"{layer}.weight")
        return _matrix(layer, kind, fields, tensors)

    def places_in_stacks(self, names: Collection[str]) -> dict[str, tuple[str, str]]:
        """Return the stack that each tensor belongs to, and its part. The metadata names the model's parameters."""
        places = {}
        for parameter in self._metadata:
            module, _, own = parameter.rpartition(".")
            if own == "weight":
                continue
            for part in _PARTS:
                if (name := f"{module}._{own}_{part}") in names:
                    places[name] = (parameter, f"{_PREFIX}{part}")
        return places

    def stack(self, name: str, tensors: Mapping[str, Tensor]) -> StoredStack:
        """Return the matrices of all experts of a layer."""
        kind, fields = self._described(name)
        codes_EOI, scale = (require(tensors, name, f"{_PREFIX}{part}") for part in ("qdata", "scale"))
        block = [int(length) for length in fields.get("block_size", ())]
        if len(block) != 3 or block[0] != 1 or codes_EOI.ndim != 3 or len(scale) != len(codes_EOI):
            raise ConfigError(
                f"{name!r} is no stack with scales for each expert: {kind}, shape {tuple(codes_EOI.shape)}, scales "
                f"{tuple(scale.shape)}, blocks {block}",
                hint="quantize it with scales of rows",
            )
        num_outputs, num_inputs = codes_EOI.shape[1:]

        def cut(expert: int, num_parts: int) -> list[StoredMatrix]:
            own = {part: tensor[expert] for part, tensor in tensors.items()}
            whole = _matrix(f"{name}[{expert}]", kind, {**fields, "block_size": block[1:]}, own)
            size = num_outputs // num_parts
            ranges = [range(size * part, size * (part + 1)) for part in range(num_parts)]
            return [whole.part(Shard(0, num_outputs, (rows,))) for rows in ranges]

        return StoredStack(name, len(codes_EOI), (num_outputs, num_inputs), cut)

    def _described(self, parameter: str) -> tuple[str | None, dict[str, Any]]:
        """Return the class name of a tensor's subclass (`None` if it has none), and its fields."""
        described = json.loads(self._metadata.get(parameter, "{}"))
        return described.get("_type"), described.get("_data", {})


def _matrix(layer: str, kind: str | None, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> StoredMatrix:
    if f"{_PREFIX}act_pre_scale" in tensors:
        raise ConfigError(f"{f'{layer}.{_PREFIX}act_pre_scale'!r}: factors of activations are not supported")
    codes, scale = require(tensors, layer, f"{_PREFIX}qdata"), require(tensors, layer, f"{_PREFIX}scale")
    match kind:
        case "Float8Tensor":
            rows: RowType | None = "fp8_token" if fields.get("act_quant_kwargs") else None
            return float8_matrix(layer, codes, scale, _block(fields), rows, None)
        case "Int8Tensor" | "IntxUnpackedToInt8Tensor":
            form = _rows(layer, tensors, fields)
            return _int8_matrix(layer, codes, scale, tensors.get(f"{_PREFIX}zero_point"), fields, form)
    raise ConfigError(
        f"{f'{layer}.weight'!r} is a {kind} of torchao, a layout that is not supported",
        hint="use Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, IntxWeightOnlyConfig, or a float8 "
        "config",
    )


def _block(fields: Mapping[str, Any]) -> tuple[int, int] | None:
    outputs, inputs = (int(length) for length in fields["block_size"])
    return (outputs, inputs) if outputs > 1 else None


def _rows(layer: str, tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> tuple[RowType | None, float | None]:
    """Return the quantization of rows and their static scale; `None` for what they do not have."""
    quantization = (fields.get("act_quant_kwargs") or {}).get("_data", {})
    mapping = quantization.get("mapping_type", {}).get("_data", "SYMMETRIC")
    if quantization.get("reduce_range"):
        raise ConfigError(
            f"{f'{layer}.weight'!r} asks for activations of 7 bits (reduce_range), which are not supported",
            hint="quantize it without reduce_range",
        )
    if not quantization or mapping != "SYMMETRIC":
        if quantization or fields.get("activation_quantization"):
            logger.warning(
                "%r asks for activations with zero points, which octavo does not have: rows stay as they are",
                f"{layer}.weight",
            )
        return None, None
    scale = tensors.get(f"{_PREFIX}act_quant_scale")
    if scale is None:
        return "int8_token", None
    if scale.numel() != 1:
        raise ConfigError(
            f"{f'{layer}.{_PREFIX}act_quant_scale'!r} holds {scale.numel()} scales of activations; expected one",
            hint="quantize it with PerTensor()",
        )
    return "int8_tensor", float(scale)


def _int8_matrix(
    layer: str,
    codes: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    fields: Mapping[str, Any],
    rows: tuple[RowType | None, float | None],
) -> StoredMatrix:
    if codes.dtype != torch.int8 or codes.ndim != 2:
        raise ConfigError(f"{f'{layer}.{_PREFIX}qdata'!r} is of type {codes.dtype}; expected int8")
    num_outputs, num_inputs = codes.shape

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
            row_type=rows[0],
            row_scale=rows[1],
            row_scaling="reciprocal",
        )

    return StoredMatrix(layer, (num_outputs, num_inputs), decode)
