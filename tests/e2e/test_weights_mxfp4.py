"""GPT-OSS checkpoints with experts in MXFP4: the values of `transformers`, and the weights of a dequantized model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from worker_plans import worker_config

from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.registry import build_model
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.parallel.sharding import Shard
from octavo.worker_proc.weights.mxfp4 import Mxfp4Matrix, Mxfp4Stack

WIDTH, INNER, EXPERTS = 64, 96, 3


def random_bytes(*shape: int, low: int = 0, high: int = 256, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def random_stack(rows: int, inputs: int, seed: int) -> tuple[Tensor, Tensor]:
    """Blocks and scales of all experts."""
    blocks = random_bytes(EXPERTS, rows, inputs // 32, 16, seed=seed)
    return blocks, random_bytes(EXPERTS, rows, inputs // 32, low=118, high=124, seed=seed + 1)


def loaded(path: Path) -> Model:
    model = build_model(worker_config(path, max_model_len=128).model, Placement(torch.float32))
    model.load_weights(load_file(path / "model.safetensors").items())
    return model


def test_values_are_those_of_transformers() -> None:
    blocks, scales = random_stack(WIDTH, INNER, seed=3)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # transposed
    for expert, matrix in enumerate(_matrices(blocks, scales)):
        assert matrix.shape == (WIDTH, INNER)
        assert torch.equal(matrix.dequantized(), expected[expert].T)
        assert torch.equal(matrix.quantized().dequantize(), matrix.dequantized())
        assert torch.equal(matrix.dequantized().bfloat16().float(), matrix.dequantized())
        part = matrix.part(Shard(1, INNER, (range(32, 64),)))
        assert torch.equal(part.dequantized(), matrix.dequantized()[:, 32:64])
        with pytest.raises(ConfigError, match="groups of 32"):
            matrix.part(Shard(1, INNER, (range(48),)))


def _matrices(blocks: Tensor, scales: Tensor) -> list[Mxfp4Matrix]:
    stack = Mxfp4Stack(EXPERTS)
    assert not list(stack.take("x_scales", scales))
    return list(stack.take("x_blocks", blocks))


def test_a_checkpoint_has_the_weights_of_its_dequantized_form(tmp_path: Path) -> None:
    dense = make_tiny(
        "GptOssForCausalLM", tmp_path / "dense", hidden_size=WIDTH, intermediate_size=INNER, num_local_experts=EXPERTS
    )
    tensors = load_file(dense / "model.safetensors")
    packed = dict(tensors)
    for layer in range(4):
        for part, rows, inputs in (("gate_up_proj", 2 * INNER, WIDTH), ("down_proj", WIDTH, INNER)):
            name = f"model.layers.{layer}.mlp.experts.{part}"
            blocks, scales = random_stack(rows, inputs, seed=layer)
            tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            del packed[name]
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, dense / "model.safetensors")
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    for file in dense.glob("*.json"):
        (quantized / file.name).write_text(file.read_text())
    config = json.loads((dense / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (quantized / "config.json").write_text(json.dumps(config))
    save_file(packed, quantized / "model.safetensors")
    expected = dict(loaded(dense).named_parameters())
    actual = dict(loaded(quantized).named_parameters())
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_damaged_stacks_are_rejected() -> None:
    blocks, scales = random_stack(WIDTH, INNER, seed=0)
    with pytest.raises(ConfigError, match="asks for 4 experts"):
        stack = Mxfp4Stack(4)
        assert not list(stack.take("x_scales", scales))
        list(stack.take("x_blocks", blocks))
    with pytest.raises(ConfigError, match="does not hold bytes"):
        list(Mxfp4Stack(EXPERTS).take("x_scales", scales.float()))
