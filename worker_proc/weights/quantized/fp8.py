"""8-bit floats (e4m3) with scales per tensor, output or block: DeepSeek's format, and vLLM's and AutoFP8's "fp8".

weight            float8_e4m3fn (outputs, inputs)
weight_scale_inv  float32 or e8m0 (outputs / 128, inputs / 128), of blocks; a multiplier, in spite of its name
weight_scale      float32, of the tensor (one number) or of outputs (outputs, 1)
input_scale       float32, one number, where activations have a static scale; Transformers calls it activation_scale

Transformers 5 saves the experts of a layer in stacks: `gate_up_proj` (experts, 2 * inner width, width), gates first,
`gate_up_proj_scale_inv` (experts, blocks of outputs, blocks of inputs), and `gate_up_proj_activation_scale` (experts).
Gates and ups have separate blocks if a block would contain outputs of both (the `min_sf_out` of its
`integrations/finegrained_fp8.py`), and separate scales if scales are per tensor.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.linear.quantized import GROUP_MULTIPLE, QuantizedWeight, RowType
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional, reject_unless
from octavo.worker_proc.parallel.sharding import Shard
from octavo.worker_proc.weights.quantized.layer_rules import HEAD, is_listed
from octavo.worker_proc.weights.quantized.layout import Layout, block_of
from octavo.worker_proc.weights.quantized.matrix import StoredMatrix, StoredStack, require

FLOAT8 = torch.float8_e4m3fn
_STACK_MARKERS = ("_scale_inv", "_scale")
"""Suffixes of a stack's name; a quantized stack has one tensor with one of them."""
_STACK_PARTS = {
    "": "weight",
    "_scale_inv": "weight_scale_inv",
    "_scale": "weight_scale",
    "_activation_scale": "activation_scale",
}
"""All name suffixes, and the part of a layer that each stands for."""


class Fp8:
    """See `octavo.worker_proc.weights.quantized.assembly.Format`."""

    markers: tuple[str, ...] = ("weight_scale_inv", "weight_scale")
    parts: tuple[str, ...] = ("weight", "weight_scale_inv", "weight_scale", "input_scale", "activation_scale")

    def __init__(self, config: Mapping[str, Any]) -> None:
        config = CheckedConfig(config, "quantization_config")
        # The type of the scale tensors shows e8m0; a limit of dynamic scales changes no weights.
        ignore(config, "quant_method", "scale_fmt", "activation_scale_ub", "quant_type", "dequantize")
        ignore(config, "kv_cache_scheme")  # protocol/config/weight_format.py
        self._skipped: list[str] = optional(config, "modules_to_not_convert", optional(config, "ignored_layers", []))
        reject_unless(config, "fmt", ("e4m3", None))
        reject_unless(config, "activation_scheme", ("dynamic", "static", None))
        self._is_static = config.get("activation_scheme") == "static"
        self._block = block_of(config, "weight_block_size")
        if self._block and self._block[1] % GROUP_MULTIPLE:
            raise ConfigError(
                f"config.json: 'weight_block_size' in 'quantization_config' is {[*self._block]}; only multiples of "
                f"{GROUP_MULTIPLE} inputs are supported"
            )
        config.reject_unread("fp8")

    def layout(self, layer: str) -> Layout | None:
        """Return the memory layout of a layer."""
        if is_listed(layer, [HEAD, *self._skipped]):
            return None
        return Layout(8, self._block[1] if self._block else None, "e4m3")

    def matrix(self, layer: str, tensors: Mapping[str, Tensor]) -> StoredMatrix:
        """Return the matrix of a layer."""
        weight = require(tensors, layer, "weight")
        scale = tensors.get("weight_scale_inv", tensors.get("weight_scale"))
        assert scale is not None, "one of the two marks a quantized layer"
        row_scale = static_scale(tensors, layer) if self._is_static else None
        return float8_matrix(layer, weight, scale, self._block, row_type(row_scale), row_scale)

    def places_in_stacks(self, names: Collection[str]) -> dict[str, tuple[str, str]]:
        """Return the stack and the part of each tensor: scales of stacks have the stack's name, those of layers
        `.weight`."""
        bases = {name.removesuffix(marker) for name in names for marker in _STACK_MARKERS if name.endswith(marker)}
        stacks = {base for base in bases if base in names and not base.endswith(".weight")}
        return {
            f"{stack}{end}": (stack, part)
            for stack in stacks
            for end, part in _STACK_PARTS.items()
            if f"{stack}{end}" in names
        }

    def stack(self, name: str, tensors: Mapping[str, Tensor]) -> StoredStack:
        """Return the matrices of all experts of a layer."""
        weight_EOI = require(tensors, name, "weight")
        if weight_EOI.dtype != FLOAT8 or any(len(tensor) != len(weight_EOI) for tensor in tensors.values()):
            found = ", ".join(f"{part} {tensor.dtype} {tuple(tensor.shape)}" for part, tensor in tensors.items())
            raise ConfigError(f"{name!r} is no stack of {FLOAT8} with scales for each expert: {found}")

        def cut(expert: int, num_parts: int) -> list[StoredMatrix]:
            own = {part: tensor[expert] for part, tensor in tensors.items()}
            layer = f"{name}[{expert}]"
            num_outputs = own["weight"].shape[0]
            parts = [dict(own) for _ in range(num_parts)]
            for key in ("weight", "weight_scale_inv", "weight_scale"):
                if key not in own or own[key].ndim < 2 or len(own[key]) == 1:
                    continue  # one number, or one row of blocks, that all parts share
                if not self._divides(len(own[key]), num_outputs, num_parts):
                    whole, size = self.matrix(layer, own), num_outputs // num_parts
                    ranges = [range(size * part, size * (part + 1)) for part in range(num_parts)]
                    return [whole.part(Shard(0, num_outputs, (rows,))) for rows in ranges]
                for part, values in zip(parts, own[key].chunk(num_parts), strict=True):
                    part[key] = values
            return [self.matrix(layer, part) for part in parts]

        return StoredStack(name, len(weight_EOI), (weight_EOI.shape[1], weight_EOI.shape[2]), cut)

    def _divides(self, num_rows: int, num_outputs: int, num_parts: int) -> bool:
        """Return whether this many rows of weights or scales divide equally among the parts of the outputs."""
        size = num_outputs // num_parts
        if self._block is None or num_rows == num_outputs:
            return num_rows % num_parts == 0
        return num_rows == num_parts * -(-size // self._block[0])


def row_type(row_scale: float | None) -> RowType:
    """Return how rows are quantized to 8-bit floats."""
    return "fp8_token" if row_scale is None else "fp8_tensor"


def static_scale(tensors: Mapping[str, Tensor], layer: str) -> float:
    """Return the scale of the rows."""
    scale = tensors.get("activation_scale")
    return float((require(tensors, layer, "input_scale") if scale is None else scale).float().max())


def float8_matrix(
    layer: str,
    weight_OI: Tensor,
    scale: Tensor,
    block: tuple[int, int] | None,
    rows: RowType | None,
    row_scale: float | None,
) -> StoredMatrix:
    """Return a matrix of 8-bit floats.

    Args:
        layer: name of the layer.
        weight_OI: the codes.
        scale: one number, or one number per output, group of inputs, or block.
        block: outputs and inputs of a block; `None` if there are none.
        rows: how rows are quantized.
        row_scale: scale of all rows.

    Raises:
        ConfigError: the weight has another type, or is not a matrix.
    """
    if weight_OI.dtype != FLOAT8 or weight_OI.ndim != 2:
        raise ConfigError(
            f"{f'{layer}.weight'!r} is of type {weight_OI.dtype} and shape {tuple(weight_OI.shape)}; expected a matrix "
            f"of {FLOAT8}"
        )
    num_outputs, num_inputs = weight_OI.shape

    def decode() -> QuantizedWeight:
        scale_OG, group_size = spread(scale, (num_outputs, num_inputs), block)
        return QuantizedWeight(
            weight_OI.contiguous().view(torch.uint8),
            scale_OG,
            None,
            0,
            8,
            group_size,
            codebook="e4m3",
            row_type=rows,
            row_scale=row_scale,
        )

    return StoredMatrix(layer, (num_outputs, num_inputs), decode)


def spread(scale: Tensor, shape: tuple[int, int], block: tuple[int, int] | None) -> tuple[Tensor, int]:
    """Return scales of groups and the group size, given scales per tensor, output, group or block.

    Raises:
        ShapeError: there are more or fewer scales than blocks or groups.
    """
    num_outputs, num_inputs = shape
    if scale.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        scale = scale.float()
    if block is not None and scale.ndim == 2:
        num_blocks = (-(-num_outputs // block[0]), -(-num_inputs // block[1]))
        if scale.shape != num_blocks:
            raise ShapeError(f"scales of {tuple(scale.shape)} blocks; expected {num_blocks}")
        return scale.repeat_interleave(block[0], 0)[:num_outputs].contiguous(), block[1]
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(num_outputs, 1).contiguous(), num_inputs
    if scale.numel() % num_outputs or not scale.numel():
        raise ShapeError(f"scales of shape {tuple(scale.shape)} for {num_outputs} outputs")
    scale_OG = scale.reshape(num_outputs, -1)
    return scale_OG, -(-num_inputs // scale_OG.shape[1])
