"""GGUF files of every architecture that llama.cpp writes give the bits of the model's safetensors files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import tiny_hybrids
import torch
from gguf import MODEL_ARCH
from gguf_converter import CONVERSIONS, convert
from model_runner import Runner, facts_of
from tiny_families import FAMILIES
from tiny_models import make_tiny

from octavo.frontend.model_files.gguf.families import FAMILIES as GGUF_FAMILIES
from octavo.kernels.linear import Packer
from octavo.protocol.config import ModelFacts
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.registry import build_model
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.weights.gguf_names import SUPPORTED_ARCHITECTURES
from octavo.worker_proc.weights.reader import read_weights

CHANGES: dict[str, dict[str, Any]] = {
    "Qwen2MoeForCausalLM": {"mlp_only_layers": []},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16, "num_hidden_layers": 6, "layer_types": None},
    "phi3": {"original_max_position_embeddings": 512},
    "mamba2": {"time_step_limit": (0.0, float("inf"))},
    "lfm2-moe": {"routed_scaling_factor": 1.0},
    "starcoder2": {"sliding_window": None},
    "glm": {"rms_norm_eps": 1e-5},
}
"""Settings that a GGUF file cannot express: the converter leaves them out, or llama.cpp has one value for them."""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
HAVE_DECAYS = ("mamba2", "mamba2-tied", "granite-hybrid")
"""Files have the exponential function of a weight, of which the logarithm is rounded."""
MODELS = {
    **tiny_hybrids.FAMILIES,
    **{name: (architecture, class_name, settings) for name, (architecture, class_name, settings) in FAMILIES.items()},
    **{architecture: (architecture, None, {}) for architecture in CONVERSIONS},
    "llama3": ("LlamaForCausalLM", None, {"rope_parameters": LLAMA3}),
}
TESTED = [
    *("LlamaForCausalLM", "llama3", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "GPT2LMHeadModel", "gemma", "gemma2", "gemma3", "granite"),
    *("GraniteMoeForCausalLM", "phi", "phi3", "phi3-window", "starcoder2", "gpt-neox", "gpt-neox-serial", "falcon-7b"),
    *("falcon-40b", "bloom", "mpt", "cohere", "cohere2", "olmo", "olmo2", "olmo3", "OlmoeForCausalLM", "glm", "glm4"),
    *("Glm4MoeForCausalLM", "exaone4", "exaone4-full", "smollm3", "arcee", "DeepseekV2ForCausalLM"),
    *("DeepseekV3ForCausalLM", "GptOssForCausalLM", "cohere-norms", "mamba2", "mamba2-tied", "granite-hybrid", "lfm2"),
    *("lfm2-bias", "lfm2-moe"),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where converted metadata is kept."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(cache))


def loaded(facts: ModelFacts) -> Model:
    """Return a model that is filled, and not packed yet."""
    model = build_model(facts, Placement(torch.float32))
    model.load_weights(read_weights(facts, lambda fraction: None, model.parameters.wants))
    return model


def tiny(name: str, directory: Path) -> Path:
    architecture, class_name, settings = MODELS[name]
    return make_tiny(architecture, directory, class_name=class_name, **{**settings, **CHANGES.get(name, {})})


@pytest.mark.parametrize("name", TESTED)
def test_gguf_and_safetensors_give_the_same_bits(name: str, tmp_path: Path) -> None:
    model = tiny(name, tmp_path / "model")
    file = convert(model, tmp_path / "model.gguf")
    tokens = [torch.arange(90) * 7 % 300]
    logits = []
    for path in (model, file):
        own = loaded(facts_of(path))
        own.pack(Packer(torch.device("cpu")))
        runner = Runner(own, torch.float32)
        logits.append(runner.in_chunks(tokens, 0, [90]))
    if name in HAVE_DECAYS:
        torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(*logits)


def test_every_architecture_is_tested() -> None:
    without_model = {"InternLM2ForCausalLM"}  # transformers has none; its file is that of a Llama with other names
    assert {MODELS[name][0] for name in TESTED} | without_model == SUPPORTED_ARCHITECTURES
    written = {gguf.MODEL_ARCH_NAMES[CONVERSIONS[MODELS[name][0]].arch] for name in TESTED}
    assert written | {"internlm2"} == set(GGUF_FAMILIES)


def test_internlm2_is_a_llama_under_another_name(tmp_path: Path) -> None:
    model = tiny("LlamaForCausalLM", tmp_path / "model")
    file = convert(model, tmp_path / "model.gguf", replace(CONVERSIONS["LlamaForCausalLM"], arch=MODEL_ARCH.INTERNLM2))
    original, read = (dict(loaded(facts_of(path)).named_parameters()) for path in (model, file))
    assert original.keys() == read.keys()
    assert all(torch.equal(read[name], values) for name, values in original.items())
