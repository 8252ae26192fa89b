"""Layers of integers as GPTQ, AWQ and AutoRound pack them, by the published formulas."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

GROUP = 32
Quantize = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]


def affine(weight_OI: Tensor, bits: int, group_size: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Round to nearest: levels OI, float16 scales OG and zero points OG."""
    groups = weight_OI.unflatten(1, (-1, group_size))
    largest = 2**bits - 1
    if symmetric:
        scale = (groups.abs().amax(2) * 2 / largest).half()
        zero = torch.full(scale.shape, 2 ** (bits - 1))
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scale = ((high - low) / largest).half()
        zero = (-low / scale.float()).round().clamp(0, largest).int()
    levels = (groups / scale.float().unsqueeze(2)).round() + zero.unsqueeze(2)
    return levels.clamp(0, largest).int().flatten(1), scale, zero


def dequantized(levels_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor, groups_I: Tensor) -> Tensor:
    return scale_OG.float()[:, groups_I] * (levels_OI - zero_OG[:, groups_I])


def pack_gptq(levels_IO: Tensor, bits: int) -> Tensor:
    """Pack like AutoGPTQ's QuantLinear.pack, which packs the rows of `intweight`."""
    rows = levels_IO.long()
    words = torch.zeros(rows.shape[0] * bits // 32, rows.shape[1], dtype=torch.int64)
    if bits != 3:
        for row in range(rows.shape[0]):
            words[row * bits // 32] |= rows[row] << (row * bits % 32)
    else:
        i = row = 0
        while row < len(words):
            for j in range(i, i + 10):
                words[row] |= rows[j] << (3 * (j - i))
            i += 10
            words[row] |= rows[i] << 30
            row += 1
            words[row] |= (rows[i] >> 2) & 1
            i += 1
            for j in range(i, i + 10):
                words[row] |= rows[j] << (3 * (j - i) + 1)
            i += 10
            words[row] |= rows[i] << 31
            row += 1
            words[row] |= (rows[i] >> 1) & 3
            i += 1
            for j in range(i, i + 10):
                words[row] |= rows[j] << (3 * (j - i) + 2)
            i += 10
            row += 1
    return as_int32(words)


def as_int32(words: Tensor) -> Tensor:
    words = words & 0xFFFFFFFF
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def gptq(
    bits: int = 4, group_size: int = GROUP, *, symmetric: bool = True, act_order: bool = False, version: str = "gptq"
) -> tuple[dict[str, Any], Quantize]:
    section = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": act_order,
        "sym": symmetric,
        "checkpoint_format": version,
        "lm_head": False,
        "true_sequential": True,
        "damp_percent": 0.01,
        "pack_dtype": "int32",
        "meta": {"quantizer": ["gptqmodel:2.0.0"]},
    }

    def quantize(layer: str, weight_OI: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        inputs = weight_OI.shape[1]
        size = inputs if group_size == -1 else group_size
        # Layers with a common input have a common order, because they have a common Hessian.
        seed = len(layer.rpartition(".")[0])
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(seed)) if act_order else None
        order = torch.arange(inputs) if order is None else order
        sorted_levels, scale, zero = affine(weight_OI[:, order], bits, size, symmetric=symmetric)
        if bits < 4:
            zero = zero.clamp(min=1)  # zero - 1 must not be negative in the first version
        groups_I = torch.empty(inputs, dtype=torch.int32)
        groups_I[order] = (torch.arange(inputs) // size).int()
        levels = torch.empty_like(sorted_levels)
        levels[:, order] = sorted_levels
        stored = zero if version == "gptq_v2" else (zero - 1).clamp(min=0)
        zero = stored if version == "gptq_v2" else stored + 1
        parts = {
            "qweight": pack_gptq(levels.t(), bits),
            "qzeros": pack_gptq(stored, bits).t(),
            "scales": scale.t(),
            "g_idx": groups_I,
        }
        return parts, dequantized(levels, scale, zero, groups_I.long())

    return section, quantize


def awq() -> tuple[dict[str, Any], Quantize]:
    section = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    section["modules_to_not_convert"] = None

    def pack(levels_NO: Tensor) -> Tensor:
        """Pack like AutoAWQ's WQLinear_GEMM.from_linear."""
        words = torch.zeros(levels_NO.shape[0], levels_NO.shape[1] // 8, dtype=torch.int64)
        for column in range(words.shape[1]):
            for i, place in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                words[:, column] |= levels_NO[:, column * 8 + place].long() << (i * 4)
        return as_int32(words)

    def quantize(layer: str, weight_OI: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        levels, scale, zero = affine(weight_OI, 4, GROUP, symmetric=False)
        parts = {"qweight": pack(levels.t()), "qzeros": pack(zero.t()), "scales": scale.t()}
        return parts, dequantized(levels, scale, zero, torch.arange(weight_OI.shape[1]) // GROUP)

    return section, quantize


def auto_round(packing: str) -> tuple[dict[str, Any], Quantize]:
    """Export like AutoRound under its own name: zero points minus one, zero points unchanged, or AWQ's words."""
    version = "gptq" if packing.endswith("gptq") else "gptq_v2"
    of_other, quantize = awq() if packing.endswith("awq") else gptq(symmetric=False, version=version)
    section = {
        "quant_method": "auto-round",
        "packing_format": packing,
        "bits": of_other["bits"],
        "group_size": GROUP,
        "sym": False,
        "data_type": "int",
        "block_name_to_quantize": "model.layers",
        "autoround_version": "0.16.1",
        "enable_quanted_input": False,
    }
    return section, quantize
