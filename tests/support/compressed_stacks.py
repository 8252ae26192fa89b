"""Stacked expert weights, compressed by compressed-tensors as three-dimensional tensors."""

from pathlib import Path
from typing import Any

import torch
from quantized_checkpoints import add_section
from safetensors.torch import load_file, save_file
from torch import Tensor

BITS_4 = {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 32}
BITS_8 = {"num_bits": 8, "strategy": "channel"}
TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
E4M3 = {"num_bits": 8, "type": "float", "strategy": "channel"}
E2M1 = {"num_bits": 4, "type": "float"}
MXFP4 = {**E2M1, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
NVFP4 = {**E2M1, "strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}
SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "w4a16": ("pack-quantized", BITS_4, None),
    "w8a16": ("pack-quantized", BITS_8, None),
    "w8a8": ("int-quantized", BITS_8, TOKEN),
    "fp8": ("float-quantized", E4M3, {**TOKEN, "type": "float"}),
    "mxfp4": ("mxfp4-pack-quantized", MXFP4, None),
    "nvfp4": ("nvfp4-pack-quantized", NVFP4, None),
}


def write_compressed_stacks(kind: str, source: Path, folder: Path, *, is_module: bool) -> dict[str, Tensor]:
    """Compress the experts of a plain checkpoint whose only layer has them; other layers stay as they are.

    Args:
        kind: kind of `SCHEMES`.
        source: source of experts with tensors of their own.
        folder: folder of a copy of it, which is changed.
        is_module: whether the tensors belong to a module of the stack, or to a parameter.

    Returns the values of all experts by compressed-tensors, under the names of the source.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    form, weights, activations = SCHEMES[kind]
    args = QuantizationArgs(**weights)
    rows = QuantizationArgs(**activations) if activations else None
    scheme = QuantizationScheme(targets=["re:.*experts.*"], weights=args, input_activations=rows, format=form)
    compressor = BaseCompressor.get_value_from_registry(form)
    tensors, values = load_file(source / "model.safetensors"), {}
    prefix = "model.layers.0.mlp.experts"
    num_experts = sum(name.startswith(prefix) and name.endswith("down_proj.weight") for name in tensors)
    for stack, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        names = [[f"{prefix}.{expert}.{part}.weight" for part in parts] for expert in range(num_experts)]
        weight_EOI = torch.stack([torch.cat([tensors.pop(name) for name in each]) for each in names])
        if args.type == "float" and args.num_bits == 4:  # the library packs matrices only
            each_compressed, exact = zip(
                *(_compress(rows, compressor, args, scheme) for rows in weight_EOI), strict=True
            )
            compressed = {part: torch.stack([own[part] for own in each_compressed]) for part in each_compressed[0]}
        else:
            compressed, exact = _compress(weight_EOI, compressor, args, scheme)
        for part, own in compressed.items():
            spelling = f".{part}" if is_module else part.removeprefix("weight")
            tensors[f"{prefix}.{stack}{spelling}"] = own.contiguous()
        for expert, each in zip(exact, names, strict=True):
            values |= dict(zip(each, (rows.contiguous() for rows in expert.chunk(len(each))), strict=True))
    save_file(tensors, folder / "model.safetensors")
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=form, quantization_status="compressed")
    add_section(folder, config.to_dict())
    return values


def _compress(weight: Tensor, compressor: Any, args: Any, scheme: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of a weight whose last dimension has the inputs, and their values."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    groups = weight.unflatten(-1, (-1, args.group_size or weight.shape[-1]))
    factor = generate_gparam(weight.amin(), weight.amax()) if args.strategy == "tensor_group" else None
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args, factor)
    state = {"weight": weight, "weight_scale": scale}
    if not args.symmetric:
        state["weight_zero_point"] = zero
    if factor is not None:
        state["weight_global_scale"] = factor
        # `decompress` rounds them to bfloat16.
        exact = fake_quantize(weight, scale, zero, args, global_scale=factor)
    compressed = {part: own for part, own in compressor.compress(state, scheme).items() if own is not None}
    if factor is None:
        exact = compressor.decompress(dict(compressed), scheme)["weight"].float()
    return compressed, exact
