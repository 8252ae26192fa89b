"""Quantized checkpoints of every format: their values, and what is computed with them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_stacks import write_compressed_stacks
from model_logprobs import PROMPT, difference, kinds, logprobs
from quantized_checkpoints import KINDS, SKIPPED, STATIC_SCALE, add_section, write, write_torchao_stacks
from safetensors.torch import load_file, save_file
from tiny_families import FAMILIES
from tiny_models import MOE_ARCHITECTURES, make_tiny
from transformers import AutoModelForCausalLM
from vendor_checkpoints import write_modelopt_stacks
from worker_plans import Driver, alone, loaded, spec, worker_config

from octavo.frontend.cli.main import main
from octavo.kernels.native import library
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.weights import packed_cache
from octavo.worker_proc.weights.load import load_model

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
ON_CODES = {
    **dict.fromkeys(("gptq", "gptq-asymmetric", "gptq-v2", "gptq-act-order", "gptq-2", "gptq-3", "awq"), "u4"),
    **dict.fromkeys(("w4a16", "w4a16-asymmetric", "w4a16-channel"), "u4"),
    **dict.fromkeys(("gptq-8", "w8a16", "llm-int8", "torchao-int8"), "u8"),
    **dict.fromkeys(("nvfp4", "mxfp4"), "u4"),
    **dict.fromkeys(("w8a8", "w8a8-static", "torchao-int8-dynamic"), "u8_channel"),
    **dict.fromkeys(("fp8-blocks", "fp8-tensor", "fp8-static", "torchao-float8"), "e4m3"),
    **dict.fromkeys(("w8a8-float", "w8a8-float-tensor", "w8a8-float-blocks", "mxfp8"), "e4m3"),
    **dict.fromkeys(("nf4", "fp4-nested"), "float4"),
    **dict.fromkeys(("auto-round", "auto-round-zeros", "auto-round-awq", "modelopt-nvfp4", "quark-mxfp4"), "u4"),
    **dict.fromkeys(("modelopt-fp8", "modelopt-outputs", "modelopt-blocks", "modelopt-mxfp8", "quark-fp8"), "e4m3"),
    "quark-int8": "u8_channel",
}
"""Formats with which native kernels multiply, and the kind of the packed weight. All others are dequantized."""
LONG = (
    *("gptq-v2", "gptq-2", "fp8-static", "w4a16-channel", "w8a8-static", "w8a8-float-tensor", "torchao-int8"),
    *("auto-round-zeros", "auto-round-awq", "modelopt-fp8", "modelopt-outputs", "modelopt-mxfp8", "quark-int8"),
)
"""Formats that others nearly cover."""
MIXED = {"u4", "e4m3", "u8_channel"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("formats") / "plain", **SIZES)


def twin(source: Path, values: dict[str, torch.Tensor], folder: Path) -> Path:
    """Write the checkpoint of the dequantized weights."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    assert values.keys() <= tensors.keys() and len(values) >= 12
    save_file(
        {name: values.get(name, tensor).contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind in LONG)) for kind in KINDS])
def test_the_values_are_those_of_the_format(kind: str, source: Path, tmp_path: Path) -> None:
    values = write(kind, source, tmp_path / "quantized")
    plain = twin(source, values, tmp_path / "plain")
    exact = logprobs(worker_config(plain))
    config = worker_config(tmp_path / "quantized")
    assert config.quantization == "none"
    torch.testing.assert_close(logprobs(config), exact, rtol=0.0, atol=2e-4)
    quantized = on_codes(tmp_path / "quantized")
    model = loaded(quantized)
    on_levels = MIXED if kind == "mixed" else {ON_CODES[kind]} if kind in ON_CODES else set()
    assert kinds(model) == {"f32"} | on_levels
    # Products with integers round activations to 8 bits, those with float codes weights and activations to bfloat16.
    expected = logprobs_of_static_rows(plain) if kind == "w8a8-static" else exact
    assert difference(logprobs(quantized, model=model), expected) < (0.1 if on_levels else 0.001)
    assert_batches_change_no_bit(model, quantized)


def logprobs_of_static_rows(path: Path) -> torch.Tensor:
    """Return the logprobs of transformers whose layers round their inputs by compressed-tensors, most beyond limits."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    args = QuantizationArgs(num_bits=8, strategy="tensor", dynamic=False)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != SKIPPED:
            layer.register_forward_pre_hook(lambda _, rows: fake_quantize(rows[0], STATIC_SCALE, None, args))
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)


def on_codes(path: Path, **settings: Any) -> ResolvedConfig:
    """Return the configuration that computes in float32 with the weights as they are."""
    own = worker_config(path, **{**settings, "dtype": "bfloat16"}).quantization
    assert own != "none"
    return worker_config(path, **settings, quantization=own)


def assert_batches_change_no_bit(model: Model, config: ResolvedConfig) -> None:
    """Compare requests in chunks and in one batch with each of them alone."""
    prompts = [[(7 * slot + 3 * place) % 300 for place in range(length)] for slot, length in enumerate((5, 40, 70))]
    driver = Driver(model, config)
    requests = [driver.admit(slot, prompt, spec(logprobs=2)) for slot, prompt in enumerate(prompts)]
    driver.step({0: 5, 1: 13, 2: 31})
    driver.step({0: 1, 1: 27, 2: 39})
    driver.run(4)
    for prompt, request in zip(prompts, requests, strict=True):
        expected = alone(model, config, prompt, spec(logprobs=2), len(request.outputs))
        assert (request.token_ids, request.logprobs) == (expected.token_ids, expected.logprobs)


def test_transformers_computes_the_same_from_dequantized_weights(source: Path, tmp_path: Path) -> None:
    plain = twin(source, write("gptq-act-order", source, tmp_path / "quantized"), tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    torch.testing.assert_close(logprobs(worker_config(tmp_path / "quantized")), expected, rtol=0.0, atol=1e-3)


def test_biases_of_zeros_that_the_model_does_not_have(source: Path, tmp_path: Path) -> None:
    """Old releases of AutoGPTQ wrote them for every layer."""
    folder = tmp_path / "quantized"
    write("gptq", source, folder)
    expected = logprobs(worker_config(folder))
    tensors = load_file(folder / "model.safetensors")
    biases = {
        name.replace("scales", "bias"): torch.zeros_like(tensors[name][0]) for name in tensors if "scales" in name
    }
    save_file(tensors | biases, folder / "model.safetensors")
    assert torch.equal(logprobs(worker_config(folder)), expected)
    biases["model.layers.1.mlp.up_proj.bias"][3] = 1
    save_file(tensors | biases, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"holds 'model\.layers\.1\.mlp\.up_proj\.bias', which this architecture"):
        loaded(worker_config(folder))


@pytest.mark.parametrize("kind", ["gptq", "gptq-act-order", "fp8-blocks", "mixed"])
def test_experts_are_quantized_one_by_one(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 256, "num_experts": 4}
    source = make_tiny("Qwen3MoeForCausalLM", tmp_path / "source", **sizes, num_hidden_layers=1)
    values = write(kind, source, tmp_path / "quantized")
    assert sum(".experts." in name for name in values) == 12
    exact = logprobs(worker_config(twin(source, values, tmp_path / "plain")))
    torch.testing.assert_close(logprobs(worker_config(tmp_path / "quantized")), exact, rtol=0.0, atol=2e-4)
    config = on_codes(tmp_path / "quantized")
    model = loaded(config)
    # Attention is dequantized where nothing multiplies with its format, experts too.
    assert kinds(model) & {"u4", "u8_channel", "e4m3"}
    assert difference(logprobs(config, model=model), exact) < 0.2
    assert_batches_change_no_bit(model, config)


@pytest.mark.parametrize("kind", ["fp8-blocks", "fp8-static"])
def test_stacks_of_experts_are_taken_apart(kind: str, tmp_path: Path) -> None:
    """As Transformers 5 saves them: the same bits as with tensors of their own."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 256, "num_experts": 4}
    source = make_tiny("Qwen3MoeForCausalLM", tmp_path / "source", **sizes, num_hidden_layers=1)
    write(kind, source, tmp_path / "apart")
    shutil.copytree(tmp_path / "apart", tmp_path / "stacked")
    tensors = load_file(tmp_path / "apart" / "model.safetensors")
    prefix = "model.layers.0.mlp.experts"
    end = "weight_scale_inv" if f"{prefix}.0.up_proj.weight_scale_inv" in tensors else "weight_scale"

    def stack(parts: tuple[str, ...], kind: str) -> torch.Tensor:
        own = [[tensors.pop(f"{prefix}.{expert}.{part}.{kind}") for part in parts] for expert in range(4)]
        return torch.stack([torch.cat([tensor.reshape(-1, *tensor.shape[1:]) for tensor in each]) for each in own])

    for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        tensors[f"{prefix}.{name}"] = stack(parts, "weight")
        scale = stack(parts, end)
        tensors[f"{prefix}.{name}_scale_inv"] = scale if scale.ndim == 3 else scale.unsqueeze(2)
        if f"{prefix}.0.{parts[0]}.input_scale" in tensors:
            tensors[f"{prefix}.{name}_activation_scale"] = stack(parts, "input_scale").amax(1)
    save_file(tensors, tmp_path / "stacked" / "model.safetensors")
    apart, stacked = on_codes(tmp_path / "apart"), on_codes(tmp_path / "stacked")
    model = loaded(stacked)
    assert "e4m3" in kinds(model)
    assert torch.equal(logprobs(stacked, model=model), logprobs(apart))
    assert_batches_change_no_bit(model, stacked)


@pytest.mark.parametrize(
    ("quantization", "kind"),
    [
        ("Int8DynamicActivationInt8WeightConfig", "u8_channel"),
        ("Float8WeightOnlyConfig", "e4m3"),
        pytest.param("Int8WeightOnlyConfig", "u8", marks=pytest.mark.long),
    ],
)
def test_stacks_of_experts_that_torchao_writes(quantization: str, kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 256, "num_experts": 4}
    source = make_tiny("Qwen3MoeForCausalLM", tmp_path / "source", **sizes, num_hidden_layers=1)
    stacks = write_torchao_stacks(quantization, source, tmp_path / "quantized")
    values = {}
    for expert in range(4):
        layer = f"model.layers.0.mlp.experts.{expert}"
        gate, up = stacks["gate_up_proj"][expert].chunk(2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": stacks["down_proj"][expert]}
        values |= {f"{layer}.{part}.weight": rows.contiguous() for part, rows in parts.items()}
    exact = logprobs(worker_config(twin(source, values, tmp_path / "plain")))
    torch.testing.assert_close(logprobs(worker_config(tmp_path / "quantized")), exact, rtol=0.0, atol=2e-4)
    config = on_codes(tmp_path / "quantized")
    model = loaded(config)
    assert kind in kinds(model)
    assert difference(logprobs(config, model=model), exact) < 0.2
    assert_batches_change_no_bit(model, config)


@pytest.mark.parametrize(
    ("scheme", "kind", "is_module"),
    [
        ("w4a16", "u4", True),
        ("w8a8", "u8_channel", False),
        ("mxfp4", "u4", True),
        pytest.param("nvfp4", "u4", False, marks=pytest.mark.long),
        pytest.param("w8a16", "u8", False, marks=pytest.mark.long),
        pytest.param("fp8", "e4m3", True, marks=pytest.mark.long),
    ],
)
def test_stacks_of_experts_of_compressed_tensors(scheme: str, kind: str, is_module: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 256, "num_experts": 4}
    source = make_tiny("Qwen3MoeForCausalLM", tmp_path / "source", **sizes, num_hidden_layers=1)
    shutil.copytree(source, tmp_path / "quantized")
    values = write_compressed_stacks(scheme, source, tmp_path / "quantized", is_module=is_module)
    exact = logprobs(worker_config(twin(source, values, tmp_path / "plain")))
    torch.testing.assert_close(logprobs(worker_config(tmp_path / "quantized")), exact, rtol=0.0, atol=2e-4)
    config = on_codes(tmp_path / "quantized")
    model = loaded(config)
    assert kind in kinds(model)
    assert difference(logprobs(config, model=model), exact) < 0.2
    assert_batches_change_no_bit(model, config)


@pytest.mark.parametrize(("algo", "kind"), [("NVFP4", "u4"), ("FP8", "e4m3")])
def test_stacks_of_experts_of_modelopt(algo: str, kind: str, tmp_path: Path) -> None:
    folder = make_tiny("Llama4ForCausalLM", tmp_path / "quantized", intermediate_size=64)
    write_modelopt_stacks(algo, folder)
    exact = logprobs(worker_config(tmp_path / "plain"))
    torch.testing.assert_close(logprobs(worker_config(folder)), exact, rtol=0.0, atol=2e-4)
    config = on_codes(folder)
    model = loaded(config)
    assert kind in kinds(model)
    assert difference(logprobs(config, model=model), exact) < 0.2
    assert_batches_change_no_bit(model, config)


@pytest.mark.parametrize("kind", ["gptq-8", "awq", "mixed", "fp8-tensor", "nf4", "llm-int8"])
def test_made_up_weights_have_the_layout_of_the_checkpoint(kind: str, source: Path, tmp_path: Path) -> None:
    """`--load-format dummy` needs the memory of the real weights."""
    write(kind, source, tmp_path / "quantized")
    config = on_codes(tmp_path / "quantized")
    real, made_up = loaded(config), loaded(on_codes(tmp_path / "quantized", load_format="dummy"))
    expected, actual = real.parameters.packed, made_up.parameters.packed
    assert {name: packed.product.packed.kind for name, packed in actual.items()} == {
        name: packed.product.packed.kind for name, packed in expected.items()
    }
    assert abs(made_up.weights_bytes - real.weights_bytes) <= 0.02 * real.weights_bytes
    assert logprobs(config, model=made_up).isfinite().all()


@pytest.mark.parametrize(("quantization", "kind"), [("fp8", "e4m3"), ("bitsandbytes", "float4")])
def test_quantized_while_loading(quantization: str, kind: str, source: Path) -> None:
    config = worker_config(source, quantization=quantization)
    model = loaded(config)
    assert kinds(model) == {"f32", kind}
    head = model.parameters.packed["lm_head"].product.packed
    assert head.kind == "f32"
    assert difference(logprobs(config, model=model), logprobs(worker_config(source))) < 0.5
    # Through torch, the numbers of the codes are multiplied.
    assert difference(logprobs(config, is_native=False), logprobs(config, model=model)) < 0.1


def test_packed_weights_of_several_formats_are_mapped_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed_cache, "MIN_KEPT_BYTES", 0)
    caplog.set_level("INFO", "octavo")
    write("mixed", source, tmp_path / "quantized")
    config = on_codes(tmp_path / "quantized")
    first, second = (
        load_model(config, lambda fraction: None, library=library.load(), cache_dir=tmp_path / "cache")
        for _ in range(2)
    )
    assert torch.equal(logprobs(config, model=first), logprobs(config, model=second))
    assert "4-bit integers with groups of 32 and zero points): products with 4-bit levels" in caplog.text
    assert "mapped packed weights" in caplog.text
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "quantized", other)
    section = json.loads((other / "config.json").read_text())["quantization_config"]
    section["config_groups"]["group_1"]["weights"]["observer"] = "mse"
    add_section(other, section)
    places = [
        packed_cache.PackedCache.of(on_codes(path), library.load(), tmp_path)
        for path in (tmp_path / "quantized", other)
    ]
    assert places[0] and places[1] and places[0].key != places[1].key


def test_what_is_dequantized_is_said(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One rank has the bits of several, which cannot divide inputs that are sorted by group."""
    caplog.set_level("INFO", "octavo")
    write("gptq-act-order", source, tmp_path / "quantized")
    loaded(on_codes(tmp_path / "quantized", enable_tp_invariant_inference=True))
    stored = "4 weights (4-bit integers with groups of 32, sorted by group (act-order))"
    assert f"{stored}: products with 4-bit levels" in caplog.text
    assert f"{stored}: dequantized to float32" in caplog.text


def test_a_second_rounding_is_logged(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write("gptq", source, tmp_path / "quantized")
    model = loaded(worker_config(tmp_path / "quantized", quantization="int8"))
    assert kinds(model) == {"u8"}
    assert "--quantization int8 rounds the checkpoint's gptq weights a second time" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("form", ["int8", "int4", "fp8", "gptq", "awq"])
def test_what_octavo_quantizes_octavo_reads(form: str, source: Path, tmp_path: Path) -> None:
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog and then the dog tells the fox. " * 40)
    flags = ["--format", form, "--no-evaluation"] + (["--group-size", "32"] if form not in ("int8", "fp8") else [])
    flags += (
        ["--calibration", str(text), "--num-samples", "4", "--sample-tokens", "64"] if form in ("gptq", "awq") else []
    )
    assert main(["quantize", str(source), str(out), *flags]) == 0
    config = on_codes(out)
    model = loaded(config)
    assert kinds(model) == {"f32", {"int8": "u8_channel", "fp8": "e4m3"}.get(form, "u4")}
    assert difference(logprobs(config, model=model), logprobs(worker_config(out))) < 0.1
    assert difference(logprobs(worker_config(out)), logprobs(worker_config(source))) < 0.7


@pytest.mark.long
@pytest.mark.parametrize("family", sorted({*FAMILIES, *MOE_ARCHITECTURES} - {"cohere-norms", "GptOssForCausalLM"}))
def test_every_family_reads_quantized_weights(family: str, tmp_path: Path) -> None:
    """Rules of names, fused and interleaved projections and stacks meet matrices in place of tensors.

    The two that are left out have norms and biases of two dimensions, which `write` would quantize.
    """
    arch, class_name, changes = FAMILIES.get(family, (family, None, {}))
    source = make_tiny(arch, tmp_path / "source", class_name=class_name, **changes)
    values = write("fp8-tensor", source, tmp_path / "quantized")
    plain = tmp_path / "plain"
    shutil.copytree(source, plain)
    tensors = load_file(source / "model.safetensors")
    merged = {name: values.get(name, tensor).contiguous() for name, tensor in tensors.items()}
    save_file(merged, plain / "model.safetensors")
    exact = logprobs(worker_config(plain, max_model_len=128))
    got = logprobs(worker_config(tmp_path / "quantized", max_model_len=128))
    torch.testing.assert_close(got, exact, rtol=0.0, atol=3e-4)
    loaded(worker_config(tmp_path / "quantized", max_model_len=128, quantization="fp8"))
