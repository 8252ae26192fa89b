"""Quantized checkpoints of every format: their values, and what is computed with them."""

import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from model_logprobs import difference, kinds, logprobs
from quantized_checkpoints import KINDS, write
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from worker_plans import loaded, worker_config

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
ON_CODES = {
    **dict.fromkeys(("gptq", "gptq-asymmetric", "gptq-v2", "gptq-2", "gptq-3", "awq"), "u4"),
    **dict.fromkeys(("w4a16", "w4a16-asymmetric", "w4a16-channel"), "u4"),
    **dict.fromkeys(("gptq-8", "w8a16", "w8a8-static", "llm-int8", "torchao-int8"), "u8"),
    **dict.fromkeys(("w8a8", "torchao-int8-dynamic"), "u8_channel"),
    **dict.fromkeys(("fp8-blocks", "fp8-tensor", "fp8-static", "torchao-float8"), "e4m3"),
    **dict.fromkeys(("w8a8-float", "w8a8-float-tensor", "w8a8-float-blocks"), "e4m3"),
    **dict.fromkeys(("nf4", "fp4-nested"), "float4"),
}
"""Formats with which native kernels multiply, and the kind of the packed weight."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("formats") / "plain", **SIZES)


def twin(source: Path, values: dict[str, torch.Tensor], folder: Path) -> Path:
    """Write the checkpoint of the dequantized weights."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    assert values.keys() <= tensors.keys() and len(values) >= 14
    save_file(
        {name: values.get(name, tensor).contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_the_values_are_those_of_the_format(kind: str, source: Path, tmp_path: Path) -> None:
    values = write(kind, source, tmp_path / "quantized")
    plain = twin(source, values, tmp_path / "plain")
    exact = logprobs(worker_config(plain))
    config = worker_config(tmp_path / "quantized")
    assert config.quantization == "none"
    torch.testing.assert_close(logprobs(config), exact, rtol=0.0, atol=2e-4)
    own = worker_config(tmp_path / "quantized", dtype="bfloat16").quantization
    quantized = msgspec.structs.replace(config, quantization=own)
    model = loaded(quantized)
    assert kinds(model) == ({"f32", ON_CODES[kind]} if kind in ON_CODES else {"f32"})
    # Products with integers round activations to 8 bits, those with float codes weights and activations to bfloat16.
    assert difference(logprobs(quantized, model=model), exact) < (0.1 if kind in ON_CODES else 0.02)
