"""The formats of Hugging Face checkpoints that `octavo quantize` writes: names, packing, `quantization_config`.

Sources: compressed-tensors 0.20 (int-quantized, pack-quantized and float-quantized); AutoGPTQ's `qlinear` (checkpoint
format "gptq", whose zeros are stored minus one); AutoAWQ's `WQLinear_GEMM`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from octavo.worker_proc.quantization.rounding import Groups, to_fp8, to_groups, to_int8

Tensors = Iterator[tuple[str, Tensor]]

_NIBBLES = 8
"""4-bit levels in an int32."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column, of eight, whose level is in each nibble of a word, lowest nibble first."""


def packed(levels: Tensor, order: tuple[int, ...] = tuple(range(_NIBBLES))) -> Tensor:
    """Pack eight neighbours of the last dimension into each int32.

    Args:
        levels: integers below 16; the last dimension is a multiple of 8.
        order: index of the level that goes into each nibble, lowest nibble first.
    """
    words = levels.to(torch.int32).unflatten(-1, (-1, _NIBBLES))
    shifted = [words[..., level] << 4 * nibble for nibble, level in enumerate(order)]
    return torch.stack(shifted, -1).sum(-1, dtype=torch.int32)


def int8_tensors(layer: str, weight_OI: Tensor) -> Tensors:
    """Yield the int-quantized tensors of a layer: levels, and a scale for each output."""
    levels_OI, scale_O1 = to_int8(weight_OI)
    yield f"{layer}.weight", levels_OI
    yield f"{layer}.weight_scale", scale_O1


def fp8_tensors(layer: str, weight_OI: Tensor) -> Tensors:
    """Yield the float-quantized tensors of a layer: numbers, and a scale for each output."""
    numbers_OI, scale_O1 = to_fp8(weight_OI)
    yield f"{layer}.weight", numbers_OI
    yield f"{layer}.weight_scale", scale_O1


def int4_tensors(layer: str, weight_OI: Tensor, group_size: int) -> Tensors:
    """Yield the pack-quantized tensors of a layer: symmetric groups of 4 bits."""
    groups = to_groups(weight_OI, group_size, is_symmetric=True)
    yield f"{layer}.weight_packed", packed(groups.levels_OI)
    yield f"{layer}.weight_scale", groups.scale_OG.half()
    yield f"{layer}.weight_shape", torch.tensor(weight_OI.shape, dtype=torch.int64)


def gptq_tensors(layer: str, groups: Groups, group_of_input_I: Tensor) -> Tensors:
    """Yield the tensors of a layer as AutoGPTQ names them."""
    yield f"{layer}.qweight", packed(groups.levels_OI).T.contiguous()
    stored_GO = (groups.zero_OG.int() - 1).T & 15
    yield f"{layer}.qzeros", packed(stored_GO)
    yield f"{layer}.scales", groups.scale_OG.half().T.contiguous()
    yield f"{layer}.g_idx", group_of_input_I.to(torch.int32)


def awq_tensors(layer: str, groups: Groups) -> Tensors:
    """Yield the tensors of a layer as AutoAWQ names them."""
    yield f"{layer}.qweight", packed(groups.levels_OI.T, _AWQ_ORDER)
    yield f"{layer}.qzeros", packed(groups.zero_OG.T, _AWQ_ORDER)
    yield f"{layer}.scales", groups.scale_OG.half().T.contiguous()


def compressed_config(kind: str, ignored: list[str], group_size: int) -> dict[str, Any]:
    """Return the `quantization_config` of int8, int4 or fp8.

    Args:
        kind: "int8", "int4" or "fp8".
        ignored: linear layers that were not quantized.
        group_size: group size of int4.
    """
    number = {"num_bits": 4 if kind == "int4" else 8, "type": "float" if kind == "fp8" else "int", "symmetric": True}
    shared = {"strategy": "group", "group_size": group_size} if kind == "int4" else {"strategy": "channel"}
    rows = None if kind == "int4" else {**number, "strategy": "token", "dynamic": True}
    formats = {"int8": "int-quantized", "int4": "pack-quantized", "fp8": "float-quantized"}
    group = {"targets": ["Linear"], "weights": {**number, **shared, "dynamic": False}, "input_activations": rows}
    return {
        "quant_method": "compressed-tensors",
        "format": formats[kind],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }


def gptq_config(group_size: int, *, orders_by_activation: bool) -> dict[str, Any]:
    """Return the `quantization_config` of GPTQ."""
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group_size,
        "desc_act": orders_by_activation,
        "sym": True,
        "true_sequential": False,
        "lm_head": False,
        "checkpoint_format": "gptq",
    }


def awq_config(group_size: int) -> dict[str, Any]:
    """Return the `quantization_config` of AWQ."""
    return {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
