"""Tiny quantized checkpoints, written by the format's own tool if installable, otherwise by the published formula.

`write(kind, source, folder)` quantizes the linear layers of a plain checkpoint and returns their values as
dequantized by the tool or the formula. None of it uses octavo's code.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from packed_float4 import float4
from packed_integers import GROUP, auto_round, awq, gptq
from safetensors.torch import load_file, save_file
from torch import Tensor
from vendor_checkpoints import modelopt, quark

SKIPPED = "lm_head"
STATIC_SCALE = torch.tensor([0.01])
"""Scale of the inputs of all layers, for static scales of compressed-tensors."""
Tensors = dict[str, Tensor]
Quantize = Callable[[str, Tensor], tuple[Tensors, Tensor]]
"""From a layer's name and weight to its tensors, by the suffix of their names, and its dequantized values."""


def write(kind: str, source: Path, folder: Path, wants: Callable[[str], bool] = lambda layer: True) -> Tensors:
    """Write a checkpoint of one of `KINDS`; return its dequantized weights, float32, by name.

    Other weights are those of the plain checkpoint, including layers that `wants` excludes; only `FORMULAS` can exclude
    layers.
    """
    folder.mkdir(parents=True)
    for file in source.glob("*.json"):
        shutil.copy(file, folder)
    if kind in TOOLS:
        return TOOLS[kind](source, folder)
    section, quantize = FORMULAS[kind]()
    tensors, values = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        is_other = tensor.ndim != 2 or "embed" in name or layer == SKIPPED
        if is_other or layer.endswith((".mlp.gate", ".gate_up_proj")) or not wants(layer):
            tensors[name] = tensor
            continue
        parts, values[name] = quantize(layer, tensor.float())
        tensors |= {f"{layer}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    add_section(folder, section)
    return values


def add_section(folder: Path, section: dict[str, Any]) -> None:
    """Add `quantization_config` to config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": section}))


def fp8(block: int | None, *, static: bool = False) -> tuple[dict[str, Any], Quantize]:
    """Quantize to FP8 with DeepSeek's blocks, or with one scale per tensor."""
    section: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
    if block:
        section |= {"fmt": "e4m3", "weight_block_size": [block, block]}

    def quantize(layer: str, weight_OI: Tensor) -> tuple[Tensors, Tensor]:
        if block is None:
            scale = weight_OI.abs().max() / 448
            codes = (weight_OI / scale).to(torch.float8_e4m3fn)
            parts = {"weight": codes, "weight_scale": scale}
            return parts | ({"input_scale": torch.tensor(0.01)} if static else {}), codes.float() * scale
        blocks = [-(-length // block) for length in weight_OI.shape]
        scale = torch.empty(blocks)
        codes = torch.empty_like(weight_OI, dtype=torch.float8_e4m3fn)
        values = torch.empty_like(weight_OI)
        for row in range(blocks[0]):
            for column in range(blocks[1]):
                part = (slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block))
                scale[row, column] = weight_OI[part].abs().max() / 448
                codes[part] = (weight_OI[part] / scale[row, column]).to(torch.float8_e4m3fn)
                values[part] = codes[part].float() * scale[row, column]
        return {"weight": codes, "weight_scale_inv": scale}, values

    return section, quantize


def compressed(
    form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None
) -> tuple[dict[str, Any], Quantize]:
    """Compress a module like compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.lifecycle.forward import quantize as ct_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    weight_args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=weight_args,
        input_activations=QuantizationArgs(**activations) if activations else None,
        format=form,
    )
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=[SKIPPED], format=form, quantization_status="compressed"
    )
    compressor = BaseCompressor.get_value_from_registry(form)

    def ranges(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        match weights["strategy"]:
            case "tensor":
                return weight_OI.min().view(1), weight_OI.max().view(1)
            case "channel":
                return weight_OI.amin(1, keepdim=True), weight_OI.amax(1, keepdim=True)
            case "block":
                rows, columns = weights["block_structure"]
                blocks = weight_OI.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
                return blocks.amin((1, 3)), blocks.amax((1, 3))
        groups = weight_OI.unflatten(1, (-1, weights["group_size"]))
        return groups.amin(2), groups.amax(2)

    def quantize(layer: str, weight_OI: Tensor) -> tuple[Tensors, Tensor]:
        scale, zero = calculate_qparams(*ranges(weight_OI), weight_args)
        state = {"weight": weight_OI, "weight_scale": scale}
        if not weights.get("symmetric", True):
            state["weight_zero_point"] = zero
        parts = compressor.compress(dict(state), scheme)
        levels = ct_quantize(weight_OI, scale, zero, weight_args, dtype=weight_args.pytorch_dtype())
        values = dequantize(levels, scale, zero, weight_args, dtype=torch.float32)
        if activations and activations.get("dynamic") is False:
            parts["input_scale"] = STATIC_SCALE.clone()
        return {part: value for part, value in parts.items() if value is not None}, values

    return config.to_dict(), quantize


def mixed() -> tuple[dict[str, Any], Quantize]:
    """Quantize 4-bit attention, its output projection in 8-bit floats, and 8-bit MLPs with 8-bit inputs."""
    groups = {
        r"re:.*\.(q|k|v)_proj$": compressed("pack-quantized", {"num_bits": 4, "symmetric": False, **_GROUP}),
        r"re:.*\.o_proj$": compressed("float-quantized", {**_E4M3, "strategy": "channel"}),
        "Linear": compressed("int-quantized", {"num_bits": 8, "strategy": "channel"}, _TOKEN),
    }
    section = next(iter(groups.values()))[0] | {"format": "mixed-precision"}
    section["config_groups"] = {
        f"group_{index}": {**group["config_groups"]["group_0"], "targets": [target]}
        for index, (target, (group, _)) in enumerate(groups.items())
    }
    attention, outputs, others = (quantize for _, quantize in groups.values())

    def quantize(layer: str, weight_OI: Tensor) -> tuple[Tensors, Tensor]:
        if layer.endswith("o_proj"):
            return outputs(layer, weight_OI)
        return (attention if "self_attn" in layer else others)(layer, weight_OI)

    return section, quantize


def with_transformers(quantization: Callable[[], Any]) -> Callable[[Path, Path], Tensors]:
    """Save a model that `transformers` quantizes while loading."""

    def run(source: Path, folder: Path) -> Tensors:
        import bitsandbytes.functional as bnb
        from bitsandbytes.nn import Linear4bit, Linear8bitLt
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            source, quantization_config=quantization(), dtype=torch.bfloat16, device_map={"": "cpu"}
        )
        model.save_pretrained(folder)
        values = {}
        for layer, module in model.named_modules():
            if not isinstance(module, torch.nn.Linear) or layer == SKIPPED:
                continue
            weight = module.weight
            if isinstance(module, Linear4bit):
                weight.quant_state.dtype = torch.float32
                values[f"{layer}.weight"] = bnb.dequantize_4bit(weight.data, weight.quant_state)
            elif isinstance(module, Linear8bitLt):
                values[f"{layer}.weight"] = weight.data.float() * (weight.SCB / 127)[:, None]
            else:
                values[f"{layer}.weight"] = weight.dequantize(output_dtype=torch.float32)
        others = load_file(folder / "model.safetensors")
        plain = load_file(source / "model.safetensors").keys() & others.keys() - values.keys()
        return values | {name: others[name].float() for name in plain}

    return run


def _nf4() -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


def _fp4_nested() -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True)


def _int8() -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True)


def _torchao(name: str, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        import torchao.quantization
        from transformers import TorchAoConfig

        return TorchAoConfig(getattr(torchao.quantization, name)(**settings))

    return make


def write_torchao_stacks(quantization: str, source: Path, folder: Path) -> Tensors:
    """Quantize the stacks of experts of one layer with a configuration of torchao, as `transformers` saves them.

    Returns their values by the last part of their names; all other tensors stay as they are.
    """
    import torchao.quantization
    from transformers import AutoModelForCausalLM, TorchAoConfig

    config = getattr(torchao.quantization, quantization)()
    stacks = ("gate_up_proj", "down_proj")
    chosen = torchao.quantization.FqnToConfig({rf"re:.*\.experts\.{name}": config for name in stacks})
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=TorchAoConfig(chosen), dtype=torch.float32, device_map={"": "cpu"}
    )
    model.save_pretrained(folder)
    experts = model.get_submodule("model.layers.0.mlp.experts")
    return {name: getattr(experts, name).dequantize(output_dtype=torch.float32) for name in stacks}


_GROUP = {"strategy": "group", "group_size": GROUP}
_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
_E4M3 = {"num_bits": 8, "type": "float"}
FORMULAS: dict[str, Callable[[], tuple[dict[str, Any], Quantize]]] = {
    "gptq": gptq,
    "gptq-asymmetric": lambda: gptq(symmetric=False),
    "gptq-v2": lambda: gptq(symmetric=False, version="gptq_v2"),
    "gptq-act-order": lambda: gptq(act_order=True),
    "gptq-8": lambda: gptq(8, -1),
    "gptq-3": lambda: gptq(3, symmetric=False),
    "gptq-2": lambda: gptq(2, symmetric=False),
    "awq": awq,
    "auto-round": lambda: auto_round("auto_round:auto_gptq"),
    "auto-round-zeros": lambda: auto_round("auto_round"),
    "auto-round-awq": lambda: auto_round("auto_round:auto_awq"),
    "fp8-blocks": lambda: fp8(32),
    "fp8-tensor": lambda: fp8(None),
    "fp8-static": lambda: fp8(None, static=True),
    "w4a16": lambda: compressed("pack-quantized", {"num_bits": 4, **_GROUP}),
    "w4a16-asymmetric": lambda: compressed("pack-quantized", {"num_bits": 4, "symmetric": False, **_GROUP}),
    "w4a16-channel": lambda: compressed("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    "w8a16": lambda: compressed("pack-quantized", {"num_bits": 8, **_GROUP}),
    "w8a8": lambda: compressed("int-quantized", {"num_bits": 8, "strategy": "channel"}, _TOKEN),
    "w8a8-static": lambda: compressed(
        "int-quantized", {"num_bits": 8, "strategy": "tensor"}, {"num_bits": 8, "strategy": "tensor", "dynamic": False}
    ),
    "w8a8-float": lambda: compressed("float-quantized", {**_E4M3, "strategy": "channel"}, {**_E4M3, **_TOKEN}),
    "w8a8-float-tensor": lambda: compressed(
        "float-quantized", {**_E4M3, "strategy": "tensor"}, {**_E4M3, "strategy": "tensor", "dynamic": False}
    ),
    "w8a8-float-blocks": lambda: compressed(
        "float-quantized",
        {**_E4M3, "strategy": "block", "block_structure": [32, 32]},
        {**_E4M3, "strategy": "group", "group_size": 32, "dynamic": True},
    ),
    "nvfp4": lambda: float4("nvfp4-pack-quantized", 16, SKIPPED),
    "mxfp4": lambda: float4("mxfp4-pack-quantized", 32, SKIPPED),
    "mxfp8": lambda: compressed("mxfp8-quantized", {**_E4M3, **_GROUP, "scale_dtype": torch.uint8}),
    "mixed": mixed,
    "modelopt-fp8": lambda: modelopt("FP8", SKIPPED),
    "modelopt-outputs": lambda: modelopt("FP8_PER_CHANNEL_PER_TOKEN", SKIPPED),
    "modelopt-blocks": lambda: modelopt("fp8_pb_wo", SKIPPED),
    "modelopt-mxfp8": lambda: modelopt("MXFP8", SKIPPED),
    "modelopt-nvfp4": lambda: modelopt("NVFP4", SKIPPED),
    "quark-fp8": lambda: quark("fp8_e4m3", SKIPPED),
    "quark-int8": lambda: quark("int8", SKIPPED),
    "quark-mxfp4": lambda: quark("fp4", SKIPPED),
}
TOOLS: dict[str, Callable[[Path, Path], Tensors]] = {
    "nf4": with_transformers(_nf4),
    "fp4-nested": with_transformers(_fp4_nested),
    "llm-int8": with_transformers(_int8),
    "torchao-int8": with_transformers(_torchao("Int8WeightOnlyConfig")),
    "torchao-int8-dynamic": with_transformers(_torchao("Int8DynamicActivationInt8WeightConfig")),
    "torchao-float8": with_transformers(_torchao("Float8WeightOnlyConfig")),
}
KINDS = (*FORMULAS, *TOOLS)
