"""Models with quantized weights, from GGUF files and from any checkpoint with --quantization."""

from pathlib import Path

import msgspec
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_files import write_gguf
from model_logprobs import difference, kinds, logprobs
from safetensors.numpy import load_file
from tiny_models import ARCHITECTURES, make_tiny
from worker_plans import loaded, worker_config
from workloads import fingerprint

from octavo.frontend.llm import LLM
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import ConfigError
from octavo.protocol.params import SamplingParams
from octavo.worker_proc.models.registry import build_model
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.weights.reader import read_weights

WIDTH = 256
"""A block of the K-quants."""
SIMPLE = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]
K_QUANTS = [Type.Q4_K, Type.Q5_K, Type.Q6_K]
NAMES = {"LlamaForCausalLM": ("llama", 4, 2), "GPT2LMHeadModel": ("gpt2", 4, 4), "Qwen2ForCausalLM": ("qwen2", 4, 2)}
SIZES = {
    "LlamaForCausalLM": {
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_attention_heads": 4,
        "head_dim": WIDTH // 4,
    },
    "Qwen2ForCausalLM": {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": 4},
    "GPT2LMHeadModel": {"n_embd": WIDTH, "n_head": 4},
}


def gguf_config(
    folder: Path, kind: Type, arch: str = "LlamaForCausalLM", other_kinds: dict[str, Type] | None = None
) -> ResolvedConfig:
    """Return the configuration of a tiny model in a GGUF file, its matrices quantized."""
    model = make_tiny(arch, folder / "model", **SIZES[arch])
    name, num_heads, num_kv_heads = NAMES[arch]
    tensors = load_file(model / "model.safetensors")
    file = write_gguf(
        folder / "model.gguf",
        name,
        tensors,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        kind=kind,
        other_kinds=other_kinds,
    )
    base = worker_config(model, dtype="bfloat16")
    facts = msgspec.structs.replace(base.model, load_format="gguf", model_path=str(file))
    return msgspec.structs.replace(base, model=facts, quantization="gguf")


def limit_of(kind: Type) -> float:
    """Return the error of products that a type may have: scales rounded to 2**-11, and differences of such."""
    return 2**-9 if kind in K_QUANTS else 1e-5


def dense(config: ResolvedConfig) -> dict[str, torch.Tensor]:
    """Return the dequantized tensors of a model by their names in it."""
    model = build_model(config.model, Placement(torch.float32))
    model.load_weights(read_weights(config.model, lambda fraction: None, model.parameters.wants))
    return dict(model.named_parameters())


def error_of_products(config: ResolvedConfig) -> float:
    """Return the largest error of any linear layer's products, relative to its largest product.

    The rows need no rounding when they are quantized to 12 bits: whole numbers, 2047 in every group.
    """
    rows = torch.randint(-2047, 2048, (5, 4 * WIDTH), generator=torch.Generator().manual_seed(0)).float()
    rows[:, ::16] = 2047
    tensors, packed = dense(config), loaded(config).parameters.packed
    errors = []
    for name, weight in packed.items():
        weight_OI = tensors[name.removeprefix("tied ")] if name.startswith("tied ") else tensors[f"{name}.weight"]
        x_TI = rows[:, : weight.num_inputs]
        expected_TO = x_TI @ weight_OI.T + tensors.get(f"{name}.bias", torch.zeros(1)).bfloat16()
        errors.append((weight.product(x_TI) - expected_TO).abs().max() / expected_TO.abs().max())
    assert len(errors) == 9
    return float(max(errors))


@pytest.mark.parametrize("kind", [*SIMPLE, *K_QUANTS])
def test_layers_multiply_by_the_weights_of_the_file(kind: Type, tmp_path: Path) -> None:
    config = gguf_config(tmp_path, kind)
    assert kinds(loaded(config)) == {"u4" if kind in (Type.Q4_0, Type.Q4_1, Type.Q4_K) else "u8"}
    assert error_of_products(config) < limit_of(kind)


@pytest.mark.parametrize("arch", ["GPT2LMHeadModel", "Qwen2ForCausalLM"])
@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_K])
def test_every_architecture_takes_quantized_weights(arch: str, kind: Type, tmp_path: Path) -> None:
    config = gguf_config(tmp_path, kind, arch)
    assert error_of_products(config) < limit_of(kind)
    dequantized = logprobs(msgspec.structs.replace(config, quantization="none"))
    assert difference(logprobs(config), dequantized) < 0.1


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_1, Type.Q6_K])
def test_only_the_rounding_of_activations_tells_quantized_from_dequantized(kind: Type, tmp_path: Path) -> None:
    config = msgspec.structs.replace(gguf_config(tmp_path, kind), dtype="float32", kv_cache_dtype="float32")
    dequantized = logprobs(msgspec.structs.replace(config, quantization="none"))
    assert 0 < difference(logprobs(config), dequantized) < 0.1


@pytest.mark.parametrize(
    ("kind", "other", "expected"),
    [
        (Type.Q4_K, Type.Q6_K, "u8"),
        (Type.Q4_0, Type.Q4_1, "u4"),
        (Type.Q4_0, Type.Q5_0, "u8"),
        (Type.Q4_1, Type.Q8_0, "u8"),
        (Type.Q5_K, Type.Q5_0, "u8"),
        (Type.Q4_0, Type.F16, "bf16"),
    ],
)
def test_parts_of_a_layer_may_have_different_types(kind: Type, other: Type, expected: str, tmp_path: Path) -> None:
    config = gguf_config(tmp_path, kind, other_kinds={"attn_v": other})
    packed = loaded(config).parameters.packed
    assert packed["layers.0.self_attn.qkv_proj"].product.packed.kind.removesuffix("_12") == expected
    if other is not Type.F16:
        assert error_of_products(config) < limit_of(kind)
    dequantized = logprobs(msgspec.structs.replace(config, quantization="none"))
    assert difference(logprobs(config), dequantized) < 0.1


@pytest.mark.parametrize(("quantization", "limit"), [("w8a8", 0.15), ("int8", 0.1), ("int4", 0.6)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_any_checkpoint_can_be_quantized_while_loading(
    dtype: str, quantization: str, limit: float, tmp_path: Path
) -> None:
    model = make_tiny("LlamaForCausalLM", tmp_path / "model", **SIZES["LlamaForCausalLM"])
    config = worker_config(model, dtype=dtype, quantization=quantization)
    exact = worker_config(model, dtype="float32")
    small = loaded(config)
    assert kinds(small) == {"w8a8": {"u8_channel", "u8"}, "int8": {"u8"}, "int4": {"u4"}}[quantization]
    assert small.weights_bytes < 0.5 * loaded(exact).weights_bytes
    error = difference(logprobs(config), logprobs(exact))
    assert 0 < error < limit


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_can_be_quantized_while_loading(arch: str, tmp_path: Path) -> None:
    config = worker_config(make_tiny(arch, tmp_path / "model"), dtype="bfloat16")
    small = msgspec.structs.replace(config, quantization="int8")
    assert kinds(loaded(small)) == {"u8"}
    assert 0 < difference(logprobs(small), logprobs(config)) < 0.1


def test_a_quantized_file_can_be_quantized_otherwise(tmp_path: Path) -> None:
    config = gguf_config(tmp_path, Type.Q8_0)
    assert kinds(loaded(msgspec.structs.replace(config, quantization="int4"))) == {"u4"}
    # In 12 bits or in 16, as the instruction set has it: the numbers are the same.
    assert kinds(loaded(msgspec.structs.replace(config, quantization="none"))) <= {"bf16", "bf16_12"}


def test_without_native_kernels_weights_are_dequantized_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = gguf_config(tmp_path, Type.Q4_0)
    got = logprobs(config, is_native=False)
    assert "dequantized to bfloat16, as no kernel here takes them" in caplog.text
    assert torch.equal(got, logprobs(msgspec.structs.replace(config, quantization="none"), is_native=False))


@pytest.mark.parametrize("quantization", ["w8a8", "int8", "int4"])
def test_quantizing_needs_native_kernels(quantization: str, tmp_path: Path) -> None:
    config = worker_config(make_tiny("LlamaForCausalLM", tmp_path / "model"), quantization=quantization)
    with pytest.raises(ConfigError, match=f"--quantization {quantization} needs the native kernels"):
        loaded(config, is_native=False)


QUESTIONS = [
    "What is the capital of France? And of Spain?",
    "What is 2 + 2?",
    "Name a colour.",
    "Write a haiku about the sea.",
]


@pytest.mark.model
@pytest.mark.parametrize("settings", [{}, {"quantization": "int8", "kv_cache_dtype": "int8"}])
def test_the_default_model_answers_from_quantized_weights_the_same_in_any_batch(
    settings: dict[str, str], smollm2_gguf: Path
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    with LLM(str(smollm2_gguf), max_model_len=512, max_num_batched_tokens=64, max_num_seqs=64, **settings) as llm:
        alone = [fingerprint(llm.chat([one], params, use_tqdm=False)[0]) for one in conversations]
        together = llm.chat(conversations * 3, params, use_tqdm=False)
    assert [fingerprint(output) for output in together] == alone * 3
    assert "Paris" in together[0].outputs[0].text
    assert "4" in together[1].outputs[0].text
