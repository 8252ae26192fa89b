"""Stacks of quantized experts: what is read, and what is refused by name."""

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from quantized_sections import assembled, compressed

from octavo.protocol.errors import ConfigError
from octavo.worker_proc.weights.quantized.assembly import Assembly, open_format
from octavo.worker_proc.weights.quantized.matrix import StoredStack


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_stacks_of_quantized_experts_without_scales_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=rf"{STACK}' of type {dtype} .*stack of quantized experts"):
        assembled({"quant_method": "fp8"}, {STACK: torch.zeros(2, 4, 16).to(dtype)})


STACK = "model.layers.0.mlp.experts.gate_up_proj"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 16]}


@pytest.mark.parametrize(
    ("config", "inner_width", "scale_shape"),
    [
        (BLOCKS, 32, (4, 2)),  # the same blocks, whether gates and ups have their own or not
        (BLOCKS, 24, (4, 2)),  # blocks of their own
        (BLOCKS, 24, (3, 2)),  # a block of the last gates and the first ups
        (BLOCKS, 4, (1, 2)),
        (BLOCKS, 4, (2, 2)),
        ({"quant_method": "fp8"}, 8, (2, 1)),  # one number for gates, one for ups
        ({"quant_method": "fp8"}, 8, (1, 1)),
        ({"quant_method": "fp8"}, 8, ()),
        ({"quant_method": "fp8"}, 8, (16, 1)),
    ],
)
def test_stacks_of_quantized_experts(config: dict[str, Any], inner_width: int, scale_shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 2 * inner_width, 32, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(3, *scale_shape, generator=generator)
    # In any order: the scales come first.
    ((name, stack),) = assembled(config, {f"{STACK}_scale_inv": scale, STACK: weight})
    assert name == STACK and isinstance(stack, StoredStack) and stack.num_experts == 3
    for expert, (gate, up) in enumerate(stack.split(2)):
        scales = scale[expert].reshape(1, 1) if scale_shape in ((), (1, 1)) else scale[expert]
        rows = len(scales)
        own_blocks = rows == 2 * -(-inner_width // 16)
        height = 1 if rows == 2 * inner_width else 2 * inner_width if rows == 1 else inner_width if rows == 2 else 16
        if own_blocks and rows > 2:
            halves = [half.repeat_interleave(16, 0)[:inner_width] for half in scales.chunk(2)]
            spread = torch.cat(halves)
        else:
            spread = scales.repeat_interleave(height, 0)[: 2 * inner_width]
        spread = spread.repeat_interleave(32 // spread.shape[1], 1)
        assert torch.equal(torch.cat([gate.dequantized(), up.dequantized()]), weight[expert].float() * spread)
        ((whole,),) = [[part] for part in stack.cut(expert, 1)]
        assert whole.shape == (2 * inner_width, 32)


def test_static_scales_of_stacks() -> None:
    tensors = {
        STACK: torch.ones(2, 8, 16).to(torch.float8_e4m3fn),
        f"{STACK}_scale_inv": torch.ones(2, 2, 1),
        f"{STACK}_activation_scale": torch.tensor([0.5, 0.25]),
    }
    ((_, stack),) = assembled({"quant_method": "fp8", "activation_scheme": "static"}, tensors)
    assert isinstance(stack, StoredStack)
    forms = [matrix.quantized() for parts in stack.split(2) for matrix in parts]
    assert [form and (form.row_type, form.row_scale) for form in forms] == [
        ("fp8_tensor", scale) for scale in (0.5, 0.5, 0.25, 0.25)
    ]


def test_stacks_whose_tensors_do_not_fit_are_refused() -> None:
    scale = {f"{STACK}_scale_inv": torch.ones(3, 2, 1)}
    with pytest.raises(ConfigError, match=rf"{STACK}' is no stack .*weight_scale_inv torch.float32 \(3, 2, 1\)"):
        assembled({"quant_method": "fp8"}, {STACK: torch.ones(2, 8, 16).to(torch.float8_e4m3fn), **scale})
    with pytest.raises(ConfigError, match=rf"{STACK}' is no stack .*torch.int8"):
        assembled({"quant_method": "fp8"}, {STACK: torch.ones(3, 8, 16, dtype=torch.int8), **scale})
    ((_, stack),) = assembled({"quant_method": "fp8"}, {STACK: torch.ones(3, 7, 16).to(torch.float8_e4m3fn), **scale})
    assert isinstance(stack, StoredStack)
    with pytest.raises(ConfigError, match="7 gates and ups of each expert, an odd number"):
        list(stack.split(2))


def torchao_stack(scale: tuple[int, ...], block: list[int]) -> Mapping[str, object]:
    fields = {"_type": "Int8Tensor", "_data": {"block_size": block, "act_quant_kwargs": None}}
    form = open_format({"quant_method": "torchao"}, {STACK: json.dumps(fields)})
    module, _, name = STACK.rpartition(".")
    tensors = {
        f"{module}._{name}_qdata": torch.arange(3 * 8 * 32).remainder(256).sub(128).to(torch.int8).view(3, 8, 32),
        f"{module}._{name}_scale": torch.arange(1.0, 1.0 + math.prod(scale)).view(scale),
    }
    assembly = Assembly(form, tensors.keys())
    assert {assembly.plain_name(tensor) for tensor in tensors} == {STACK}
    taken = [assembly.take(name, tensor) for name, tensor in tensors.items()]
    return dict(result for result in taken if result is not None)


def test_stacks_of_torchao() -> None:
    stack = torchao_stack((3, 8, 1), [1, 1, 32])[STACK]
    assert isinstance(stack, StoredStack) and stack.num_experts == 3 and stack.expert == (8, 32)
    levels = torch.arange(3 * 8 * 32).remainder(256).sub(128).view(3, 8, 32)
    expected = levels * torch.arange(1.0, 25.0).view(3, 8, 1)
    for expert, parts in enumerate(stack.split(2)):
        assert torch.equal(torch.cat([part.dequantized() for part in parts]), expected[expert])


@pytest.mark.parametrize(("scale", "block"), [((1, 8, 1), [3, 1, 32]), ((3, 1, 1), [8, 32])])
def test_stacks_of_torchao_without_scales_of_experts_are_refused(scale: tuple[int, ...], block: list[int]) -> None:
    with pytest.raises(ConfigError, match=rf"{STACK}' is no stack with scales for each expert: Int8Tensor"):
        torchao_stack(scale, block)


INT8 = compressed({"num_bits": 8, "strategy": "channel"}, format="int-quantized")


@pytest.mark.parametrize("spelling", ["_scale", ".weight_scale"])
@pytest.mark.parametrize("scale_shape", [(3, 8, 1), (3, 8), (3, 1, 1), (3,), (1,)])
def test_stacks_of_compressed_tensors(spelling: str, scale_shape: tuple[int, ...]) -> None:
    levels = torch.arange(3 * 8 * 32).remainder(256).sub(128).to(torch.int8).view(3, 8, 32)
    scale = torch.arange(1.0, 1.0 + math.prod(scale_shape)).view(scale_shape)
    end = ".weight" if spelling.startswith(".") else ""
    ((name, stack),) = assembled(INT8, {f"{STACK}{spelling}": scale, f"{STACK}{end}": levels})
    assert name == STACK and isinstance(stack, StoredStack) and stack.expert == (8, 32)
    expected = levels * (scale if scale.ndim == 3 else scale.view(len(scale), -1, 1))
    for expert, parts in enumerate(stack.split(2)):
        assert torch.equal(torch.cat([part.dequantized() for part in parts]), expected[expert])


@pytest.mark.parametrize(("shape", "scale_shape"), [((3, 8, 32), (4, 8, 1)), ((24, 32), (24, 1))])
def test_stacks_of_compressed_tensors_that_do_not_fit_are_refused(
    shape: tuple[int, ...], scale_shape: tuple[int, ...]
) -> None:
    tensors = {STACK: torch.zeros(shape, dtype=torch.int8), f"{STACK}_scale": torch.ones(scale_shape)}
    with pytest.raises(ConfigError, match=rf"{STACK}' is no stack .*weight_scale torch.float32"):
        assembled(INT8, tensors)


def test_blocks_that_gates_and_ups_do_not_share_are_refused() -> None:
    """24 gates and 24 ups in blocks of 16 outputs have three blocks, or four if none has outputs of both."""
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 16]}
    tensors = {STACK: torch.zeros(3, 48, 16).to(torch.float8_e4m3fn), f"{STACK}_scale": torch.ones(3, 4, 1)}
    ((_, stack),) = assembled(compressed(weights, format="float-quantized"), tensors)
    with pytest.raises(ConfigError, match=r"scales of \(4, 1\) blocks; expected \(3, 1\)"):
        stack.cut(0, 2)[0].dequantized() if isinstance(stack, StoredStack) else None
