"""LoRA adapters in models: equal to peft's merged weights, and to the model alone; the same bits in any batch."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_files import write_gguf
from model_runner import Runner, load, prompts
from pairwise import pairwise_first
from peft_adapters import load_of, write_adapter
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file, save_file
from tiny_families import FAMILIES
from tiny_models import ARCHITECTURES, VOCAB_SIZE, make_tiny
from torch import Tensor
from transformers import AutoModelForCausalLM
from worker_plans import worker_config

from octavo.kernels.native import library
from octavo.protocol.adapters import NO_ADAPTER
from octavo.protocol.config.lora import ResolvedLoRA
from octavo.worker_proc.lora.loader import AdapterLoader
from octavo.worker_proc.lora.slots import AdapterSlots
from octavo.worker_proc.weights.load import load_model

TARGETS = ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]
TOKENS = prompts(VOCAB_SIZE)
CONFIG = ResolvedLoRA(max_loras=3, max_rank=16, max_cpu_loras=3, dtype="float32")


def make_family(name: str, path: Path) -> Path:
    """Write a tiny model of a family, or of an architecture."""
    if name in ARCHITECTURES:
        return make_tiny(name, path)
    arch, config_class, settings = FAMILIES[name]
    return make_tiny(arch, path, class_name=config_class, **settings)


def runner_of(model_path: Path, *, is_native: bool, dtype: torch.dtype = torch.float32) -> tuple[Runner, AdapterLoader]:
    """Return a model with slots for adapters."""
    model = load(model_path, dtype, library.load() if is_native else None)
    config = (
        CONFIG if dtype == torch.float32 else ResolvedLoRA(max_loras=3, max_rank=16, max_cpu_loras=3, dtype="bfloat16")
    )
    loader = AdapterLoader(AdapterSlots(model, config), config.max_cpu_loras)
    return Runner(model, dtype), loader


def logits_of(runner: Runner, request: int, slot: int) -> Tensor:
    """Return the logits of a prompt, computed alone with the adapter of a slot."""
    runner.adapters[request] = slot
    return runner.in_chunks(TOKENS, request, [len(TOKENS[request])])


def check_merged(model_path: Path, tmp_path: Path, settings: Mapping[str, Any], *, is_native: bool) -> None:
    """Compare with merged weights, and requests without an adapter with the model alone."""
    merged = write_adapter(model_path, tmp_path / "adapter", **settings)
    runner, loader = runner_of(model_path, is_native=is_native)
    alone = Runner(load(model_path, torch.float32, library.load() if is_native else None), torch.float32)
    assert loader.apply([load_of(tmp_path / "adapter", 1)]) == []
    base = alone.in_chunks(TOKENS, 1, [len(TOKENS[1])])
    assert torch.equal(logits_of(runner, 1, NO_ADAPTER), base)
    assert torch.equal(logits_of(runner, 1, 0), base)  # an empty slot
    with torch.inference_mode():
        expected = merged(TOKENS[1][None]).logits[0].log_softmax(1)
    assert (base.log_softmax(1) - expected).abs().max() > 1e-2
    torch.testing.assert_close(logits_of(runner, 1, 1).log_softmax(1), expected, rtol=1e-4, atol=1e-4)


STEPS = ([(0, 0, 130), (1, 0, 5), (2, 0, 130)], [(0, 130, 131), (1, 5, 37)], [(0, 131, 200), (2, 130, 131)])
NAMES = ["Qwen2ForCausalLM", "GPT2LMHeadModel", "phi3", "glm"]
"""Other names, transposed weights, fused rows, and rows in another order."""
MORE_NAMES = [
    "OPTForCausalLM",
    "Qwen3ForCausalLM",
    "gpt-neox",
    "phi",
    "cohere",
    "starcoder2",
    "falcon-7b",
    "granite",
    "olmo2",
]


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.long) for name in MORE_NAMES)])
def test_all_linear_layers(name: str, tmp_path: Path) -> None:
    check_merged(make_family(name, tmp_path / "model"), tmp_path, {}, is_native=True)


def test_rows_of_a_recurrence(tmp_path: Path) -> None:
    settings = {"target_modules": ["in_proj"]}
    check_merged(make_family("mamba2", tmp_path / "model"), tmp_path, settings, is_native=True)


PATTERNS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True, "target_modules": ["q_proj", "v_proj"], "r": 5},
    "patterns": {
        "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.down_proj": 16},
        "alpha_pattern": {"down_proj": 40, "gate_proj": 2},
        "target_modules": r".*\.(q_proj|down_proj|gate_proj)",
    },
    "layers": {"layers_to_transform": [1], "target_modules": ["o_proj", "up_proj"]},
    "tables": {"target_modules": ["embed_tokens", "lm_head", "k_proj"], "lora_alpha": 64},
}


@pytest.mark.parametrize(("name", "is_native"), pairwise_first(list(PATTERNS), [True, False]))
def test_settings(name: str, is_native: bool, tmp_path: Path) -> None:
    check_merged(make_tiny("LlamaForCausalLM", tmp_path / "model"), tmp_path, PATTERNS[name], is_native=is_native)


def test_weights_of_torch(tmp_path: Path) -> None:
    model_path = make_tiny("LlamaForCausalLM", tmp_path / "model")
    merged = write_adapter(model_path, tmp_path / "adapter")
    tensors = tmp_path / "adapter" / "adapter_model.safetensors"
    torch.save(load_file(tensors), tensors.with_suffix(".bin"))
    tensors.unlink()
    runner, loader = runner_of(model_path, is_native=True)
    assert loader.apply([load_of(tmp_path / "adapter")]) == []
    with torch.inference_mode():
        expected = merged(TOKENS[1][None]).logits[0]
    torch.testing.assert_close(logits_of(runner, 1, 0).log_softmax(1), expected.log_softmax(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantization", ["int8", "int4", "gguf"])
def test_adapters_of_quantized_weights(quantization: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    path = make_tiny("LlamaForCausalLM", tmp_path / "model", **sizes)
    merged = write_adapter(path, tmp_path / "adapter", target_modules=TARGETS)
    config = worker_config(path, quantization="int8" if quantization == "gguf" else quantization)
    if quantization == "gguf":  # its rows of queries and keys are in another order
        tensors, kind = load_numpy(path / "model.safetensors"), GGMLQuantizationType.Q8_0
        file = write_gguf(tmp_path / "x.gguf", "llama", tensors, num_heads=4, num_kv_heads=2, kind=kind)
        facts = msgspec.structs.replace(config.model, load_format="gguf", model_path=str(file))
        config = msgspec.structs.replace(config, model=facts, quantization="gguf")
    model = load_model(config, lambda fraction: None, library=library.load())
    loader = AdapterLoader(AdapterSlots(model, CONFIG), 1)
    runner = Runner(model, torch.float32)
    assert loader.apply([load_of(tmp_path / "adapter")]) == []
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        expected, before = (weights(TOKENS[1][None]).logits[0] for weights in (merged, base))
    update = logits_of(runner, 1, 0) - logits_of(runner, 1, NO_ADAPTER)
    # The weights are rounded, the adapter is not.
    assert (update - (expected - before)).norm() < (0.5 if quantization == "int4" else 0.1) * (expected - before).norm()


@pytest.mark.parametrize(
    ("name", "dtype", "is_native"),
    [
        ("LlamaForCausalLM", torch.bfloat16, True),
        ("phi3", torch.float32, False),
        pytest.param("GPT2LMHeadModel", torch.float32, True, marks=pytest.mark.long),
        pytest.param("LlamaForCausalLM", torch.bfloat16, False, marks=pytest.mark.long),
    ],
)
def test_neighbours_do_not_change_a_bit(name: str, dtype: torch.dtype, is_native: bool, tmp_path: Path) -> None:
    model_path = make_family(name, tmp_path / "model")
    for seed, settings in enumerate(({"r": 16}, {"r": 3}, {"target_modules": "all-linear", "lora_alpha": 4})):
        write_adapter(model_path, tmp_path / str(seed), seed, **settings)
    runner, loader = runner_of(model_path, is_native=is_native, dtype=dtype)
    assert loader.apply([load_of(tmp_path / str(slot), slot) for slot in range(3)]) == []
    alone = {(request, slot): logits_of(runner, request, slot) for request in range(3) for slot in range(NO_ADAPTER, 3)}
    noise = torch.Generator().manual_seed(3)
    for _ in range(6):
        runner.adapters[:3] = torch.randint(NO_ADAPTER, 3, (3,), generator=noise).tolist()
        for parts in (
            [(0, 0, 130), (1, 0, 5), (2, 0, 130)],
            [(0, 130, 131), (1, 5, 37)],
            [(0, 131, 200), (2, 130, 131)],
        ):
            for logits, (request, start, end) in zip(runner.step(TOKENS, parts), parts, strict=True):
                assert torch.equal(logits, alone[request, runner.adapters[request]][start:end])
        # Other adapters come and go meanwhile.
        slot = int(torch.randint(0, 3, (1,), generator=noise))
        loader.apply([load_of(tmp_path / str((slot + 1) % 3), slot), load_of(tmp_path / str(slot), slot)])


Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
STRANGER = "base_model.model.model.layers.7.self_attn.q_proj"
DAMAGE: dict[str, tuple[dict[str, Any], dict[str, Tensor | None], str]] = {
    "dora": ({"use_dora": True}, {}, "use_dora"),
    "bias": ({"bias": "all"}, {}, "bias is 'all'"),
    "unknown": ({"new_feature": {"a": 1}}, {}, "new_feature"),
    "kind": ({"peft_type": "LOHA"}, {}, "LOHA"),
    "pissa": ({"init_lora_weights": "pissa"}, {}, "init_lora_weights"),
    "saved": ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
    "rank": ({"r": 600}, {}, "r is 600"),
    "target": ({"target_modules": ["v_proj"]}, {}, "target_modules"),
    "another rank": ({"r": 4}, {}, "the rank 4"),
    "shape": ({}, {f"{Q_PROJ}.lora_A.weight": torch.zeros(8, 47)}, "q_proj' has 47 inputs"),
    "factor": ({}, {f"{Q_PROJ}.lora_A.weight": None}, "only one of its two factors"),
    "stranger": (
        {},
        {f"{STRANGER}.lora_A.weight": torch.zeros(8, 48), f"{STRANGER}.lora_B.weight": torch.zeros(96, 8)},
        "'model.layers.7.self_attn.q_proj'",
    ),
    "nan": ({}, {f"{Q_PROJ}.lora_A.weight": torch.full((8, 48), torch.nan)}, "q_proj' has numbers that are NaN"),
    "magnitude": ({}, {f"{Q_PROJ}.lora_magnitude_vector": torch.zeros(96)}, "DoRA"),
}
"""Changes of the configuration and of tensors, and what the message says."""


def damage(path: Path, fields: dict[str, Any], tensors: dict[str, Tensor | None]) -> None:
    """Change the files of an adapter."""
    config_file, tensors_file = path / "adapter_config.json", path / "adapter_model.safetensors"
    config_file.write_text(json.dumps({**json.loads(config_file.read_text()), **fields}))
    changed = {**load_file(tensors_file), **tensors}
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, tensors_file)


def test_damage_fails_its_load_alone(tmp_path: Path) -> None:
    model_path = make_tiny("LlamaForCausalLM", tmp_path / "model")
    runner, loader = runner_of(model_path, is_native=True)
    base = logits_of(runner, 1, NO_ADAPTER)
    write_adapter(model_path, tmp_path / "right", target_modules=["q_proj"])
    for name, (fields, tensors, expected) in DAMAGE.items():
        path = tmp_path / name
        shutil.copytree(tmp_path / "right", path)
        assert loader.apply([load_of(tmp_path / "right", 2)]) == []
        damage(path, fields, tensors)
        (fault,) = loader.apply([load_of(path, 2)])
        assert fault.slot == 2 and expected in fault.message and str(path) in fault.message, fault.message
        assert torch.equal(logits_of(runner, 1, 2), base)


def test_ranks_above_the_slots_and_damaged_files(tmp_path: Path) -> None:
    model_path = make_tiny("LlamaForCausalLM", tmp_path / "model")
    _, loader = runner_of(model_path, is_native=True)
    write_adapter(model_path, tmp_path / "a", target_modules=["q_proj"], r=32)
    load = load_of(tmp_path / "a")
    assert "rank 32, above --max-lora-rank 16" in loader.apply([load])[0].message
    damage(tmp_path / "a", {"r": 16}, {})
    assert "has changed" in loader.apply([load])[0].message
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"garbage")
    assert "damaged" in loader.apply([load_of(tmp_path / "a")])[0].message
