"""Layers as ModelOpt and Quark export them, by the published formulas."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from packed_float4 import NUMBERS
from safetensors.torch import load_file, save_file
from torch import Tensor

Quantize = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]
FLOAT8 = torch.float8_e4m3fn
BLOCK = 128
INPUT_SCALE = torch.tensor(0.01)


def float4_codes(numbers_OI: Tensor) -> Tensor:
    """Return the codes of the nearest 4-bit floats."""
    return (numbers_OI.abs().unsqueeze(2) - NUMBERS).abs().argmin(2) + 8 * (numbers_OI < 0)


def float4(codes_OI: Tensor) -> Tensor:
    """Return the numbers of codes."""
    return NUMBERS[codes_OI & 7] * (1.0 - 2.0 * (codes_OI >> 3))


def packed(codes_OI: Tensor) -> Tensor:
    """Return two codes in each byte, the first one in the low half."""
    return (codes_OI[:, ::2] | codes_OI[:, 1::2] << 4).to(torch.uint8)


def powers_of_two(largest: Tensor, largest_exponent: int) -> Tensor:
    """Return the scales of groups in microscaling formats, by their largest magnitudes."""
    return 2.0 ** (largest.log2().floor() - largest_exponent)


def exponents(scale: Tensor) -> Tensor:
    """Return powers of two as bytes (e8m0)."""
    return (scale.log2() + 127).to(torch.uint8)


def modelopt(algo: str, skipped: str) -> tuple[dict[str, Any], Quantize]:
    """Return `quantization_config`, and what makes of a layer's weight its tensors and their values."""
    section = {
        "quant_method": "modelopt",
        "quant_algo": algo,
        "ignore": [skipped],
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "config_groups": {"group_0": {"targets": ["Linear"]}},
    }

    def quantize(layer: str, weight_OI: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if algo == "NVFP4":
            groups = weight_OI.unflatten(1, (-1, 16))
            of_tensor = weight_OI.abs().max() / (6 * 448)
            scale = (groups.abs().amax(2) / 6 / of_tensor).to(FLOAT8)
            of_inputs = (scale.float() * of_tensor).repeat_interleave(16, 1)
            codes = float4_codes(weight_OI / of_inputs)
            parts = {"weight": packed(codes), "weight_scale": scale, "weight_scale_2": of_tensor}
            return {**parts, "input_scale": INPUT_SCALE.clone()}, float4(codes) * of_inputs
        if algo == "MXFP8":
            scale = powers_of_two(weight_OI.unflatten(1, (-1, 32)).abs().amax(2), 8)
            of_inputs, stored = scale.repeat_interleave(32, 1), exponents(scale)
        elif algo == "fp8_pb_wo":
            blocks = [-(-length // BLOCK) for length in weight_OI.shape]
            whole = torch.zeros(blocks[0] * BLOCK, blocks[1] * BLOCK)
            whole[: weight_OI.shape[0], : weight_OI.shape[1]] = weight_OI
            stored = whole.view(blocks[0], BLOCK, blocks[1], BLOCK).abs().amax((1, 3), keepdim=True) / 448
            of_inputs = stored.expand(-1, BLOCK, -1, BLOCK).reshape(whole.shape)
            of_inputs = of_inputs[: weight_OI.shape[0], : weight_OI.shape[1]]
        elif algo == "FP8_PER_CHANNEL_PER_TOKEN":
            stored = weight_OI.abs().amax(1) / 448
            of_inputs = stored.unsqueeze(1)
        else:
            stored = of_inputs = weight_OI.abs().max() / 448
        codes = (weight_OI / of_inputs).clamp(-448, 448).to(FLOAT8)
        parts = {"weight": codes, "weight_scale": stored}
        return parts | ({"input_scale": INPUT_SCALE.clone()} if algo == "FP8" else {}), codes.float() * of_inputs

    return section, quantize


def quark(dtype: str, skipped: str) -> tuple[dict[str, Any], Quantize]:
    """Return `quantization_config`, and what makes of a layer's weight its tensors and their values."""
    is_float4 = dtype == "fp4"
    usual = {"dtype": dtype, "symmetric": True, "is_dynamic": False, "ch_axis": 0, "observer_cls": "any"}
    usual |= {"qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"} if is_float4 else {}
    weight = usual if is_float4 else {**usual, "qscheme": "per_channel"}
    rows = {**weight, "is_dynamic": True} if dtype != "fp8_e4m3" else {**usual, "qscheme": "per_tensor"}
    section = {
        "quant_method": "quark",
        "exclude": [skipped],
        "global_quant_config": {"weight": weight, "input_tensors": rows, "output_tensors": None, "bias": None},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        "quant_mode": "eager_mode",
        "version": "0.13",
    }

    def quantize(layer: str, weight_OI: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if is_float4:
            scale = powers_of_two(weight_OI.unflatten(1, (-1, 32)).abs().amax(2), 2)
            of_inputs = scale.repeat_interleave(32, 1)
            codes = float4_codes(weight_OI / of_inputs)
            return {"weight": packed(codes), "weight_scale": exponents(scale)}, float4(codes) * of_inputs
        scale = weight_OI.abs().amax(1) / (448 if dtype == "fp8_e4m3" else 127)
        levels = weight_OI / scale.unsqueeze(1)
        codes = levels.to(FLOAT8) if dtype == "fp8_e4m3" else levels.round().to(torch.int8)
        parts = {"weight": codes, "weight_scale": scale}
        parts |= {"input_scale": INPUT_SCALE.clone()} if dtype == "fp8_e4m3" else {}
        return parts, codes.float() * scale.unsqueeze(1)

    return section, quantize


def write_modelopt_stacks(algo: str, folder: Path) -> None:
    """Quantize the experts of a Llama 4 in its folder as ModelOpt does: stacks with inputs before outputs.

    The folder beside it, "plain", gets the checkpoint of their values.
    """
    section, quantize = modelopt(algo, "*self_attn*")
    shutil.copytree(folder, folder.parent / "plain")
    tensors = load_file(folder / "model.safetensors")
    values = dict(tensors)
    for stack in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        weight_EIO = tensors.pop(stack)
        own, exact = quantize(stack, weight_EIO.transpose(1, 2).flatten(0, 1))

        def turned(rows: Tensor, num_experts: int = len(weight_EIO)) -> Tensor:
            return rows.unflatten(0, (num_experts, -1)).transpose(1, 2).contiguous()

        values[stack] = turned(exact)
        for part, tensor in own.items():
            end = "" if part == "weight" else f"_{part}"
            tensors[f"{stack}{end}"] = turned(tensor) if tensor.ndim == 2 else tensor
    save_file(values, folder.parent / "plain" / "model.safetensors")
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
