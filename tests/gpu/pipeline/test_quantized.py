"""Steps of models with quantized weights: close to the dequantized ones, and the same bits in any company."""

import logging
import shutil
from pathlib import Path

import pytest
import quantized_checkpoints
import torch
from gpu_steps import NUM_STEPS, SETTINGS, driver, prompt
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from worker_plans import Running, alone, loaded, spec, worker_config

from octavo.kernels.linear.gpu_quantized import QuantizedProduct
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.weights.load import load_model

pytestmark = [pytest.mark.filterwarnings("ignore:All-NaN"), pytest.mark.xdist_group("pipeline")]

KINDS = {
    "gptq-act-order": "4-bit levels",
    "w8a8": "8-bit levels and rows with one scale each",
    "w8a8-float": "8-bit floats and rows of 8-bit floats",
    "w4a16 experts": "4-bit levels",
    "fp8-blocks experts": "8-bit floats",
}
LONG = ("w8a8", "w8a8-float", "fp8-blocks experts")
AS_ON_CPU = ("gptq-act-order", "w4a16 experts")
PROMPT, SAMPLING = prompt(8, seed=1), spec(temperature=1.0, seed=7, logprobs=1, prompt_logprobs=0)
SMALL = {**SETTINGS, "max_num_seqs": 2, "max_num_batched_tokens": 8, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("quantized")
    plain = make_tiny(
        "LlamaForCausalLM",
        folder / "plain",
        num_hidden_layers=1,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    mixture = make_tiny(
        "Qwen3MoeForCausalLM",
        folder / "mixture",
        num_hidden_layers=1,
        hidden_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    for kind in KINDS:
        source = mixture if kind.endswith(" experts") else plain
        quantized_checkpoints.write(kind.removesuffix(" experts"), source, folder / kind)
    return {kind: folder / kind for kind in KINDS}


@pytest.fixture(scope="module")
def computed_on_cpu(directories: dict[str, Path]) -> dict[str, Running]:
    """Return what numbers of the levels give."""
    configs = {kind: worker_config(directories[kind], quantization="none", **SMALL) for kind in AS_ON_CPU}
    return {kind: alone(loaded(config), config, PROMPT, SAMPLING, NUM_STEPS) for kind, config in configs.items()}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind in LONG)) for kind in KINDS])
def test_quantized_weights_in_chunks_in_company_and_through_graphs(
    kind: str,
    directories: dict[str, Path],
    computed_on_cpu: dict[str, Running],
    _kernels_of_gpus: None,
    stream: Stream,
    device: torch.device,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = worker_config(directories[kind], device="cuda", **SMALL)
    with caplog.at_level(logging.INFO):
        model = load_model(config, lambda fraction: None, device=device)
    assert [record.getMessage() for record in caplog.records if f"products with {KINDS[kind]}" in record.getMessage()]
    if kind.endswith(" experts"):
        experts = [weight for name, weight in model.parameters.packed.items() if ".experts." in name]
        assert len(experts) == 12
        assert all(isinstance(weight.product, QuantizedProduct) for weight in experts)
    eager = driver(model, config, stream, has_graphs=False)
    alone_request = eager.admit(0, PROMPT, SAMPLING)
    eager.run(NUM_STEPS)
    eager.executor.close()
    if kind in AS_ON_CPU:
        assert alone_request.outputs == computed_on_cpu[kind].outputs
        for found, wanted in zip(alone_request.logprobs, computed_on_cpu[kind].logprobs, strict=True):
            assert found.logprobs == pytest.approx(wanted.logprobs, abs=0.06), "of products in bfloat16"
    core = driver(model, config, stream)
    core.admit(0, prompt(4), spec())
    request = core.admit(1, PROMPT, SAMPLING)
    core.begin({0: 4, 1: 3})
    core.begin({0: 1, 1: 5})
    core.run(NUM_STEPS - 1)
    core.executor.close()
    assert request.outputs == alone_request.outputs
    assert request.logprobs == alone_request.logprobs


def test_a_cache_of_integers(
    directories: dict[str, Path],
    computed_on_cpu: dict[str, Running],
    _kernels_of_gpus: None,
    stream: Stream,
    device: torch.device,
) -> None:
    """A prompt in chunks beside another one has the bits that it has alone, close to those of other caches."""
    config = worker_config(directories["gptq-act-order"], device="cuda", kv_cache_dtype="int8", **SMALL)
    model = load_model(config, lambda fraction: None, device=device)
    core = driver(model, config, stream, has_graphs=False)
    whole = core.admit(0, PROMPT, SAMPLING)
    core.run(2)
    core.executor.close()
    core = driver(model, config, stream, has_graphs=False)
    core.admit(0, prompt(4), spec())
    request = core.admit(1, PROMPT, SAMPLING)
    core.begin({0: 4, 1: 3})
    core.begin({0: 1, 1: 5})
    core.run(1)
    core.executor.close()
    assert request.outputs[:2] == whole.outputs[:2] and request.logprobs[:2] == whole.logprobs[:2]
    for entry, wanted in zip(whole.prompt_logprobs, computed_on_cpu["gptq-act-order"].prompt_logprobs, strict=True):
        if entry is not None:
            assert entry.logprobs == pytest.approx(wanted.logprobs, abs=0.1)


@pytest.mark.parametrize("factor", [1.0, pytest.param(1 / 300, marks=pytest.mark.long)])
def test_a_cache_with_the_scales_of_the_checkpoint(
    factor: float,
    tmp_path: Path,
    directories: dict[str, Path],
    computed_on_cpu: dict[str, Running],
    _kernels_of_gpus: None,
    stream: Stream,
    device: torch.device,
) -> None:
    """With a factor, keys and values would be larger than the largest number, if nothing read it."""
    folder = tmp_path / "scaled"
    shutil.copytree(directories["gptq-act-order"], folder)
    scales = {"k_scale": 0.02 * factor, "v_scale": 0.02 * factor}
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{name}": torch.tensor([scale]) for name, scale in scales.items()}
    save_file(tensors, folder / "model.safetensors")
    settings = {**SMALL, "enable_prefix_caching": False, "kv_cache_dtype": "fp8"}
    config = worker_config(folder, device="cuda", **settings)
    model = load_model(config, lambda fraction: None, device=device)
    assert model.cache_scales == {0: pytest.approx((scales["k_scale"], scales["v_scale"]))}
    core = driver(model, config, stream, has_graphs=False)
    request = core.admit(0, PROMPT, SAMPLING)
    core.run(1)
    core.executor.close()
    found, wanted = (
        torch.tensor([entry.logprobs[0] for entry in one.prompt_logprobs if entry is not None])
        for one in (request, computed_on_cpu["gptq-act-order"])
    )
    difference = float((found - wanted).abs().max())
    assert (difference < 0.2) == (factor == 1.0), f"{difference}: numbers beyond 448 times the scale are cut"
