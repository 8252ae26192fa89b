"""Adapters of experts in models: equal to peft's merged weights, under the names of both of its forms."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from model_runner import Runner, load, prompts
from peft_adapters import load_of, write_adapter
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE, make_tiny
from transformers import AutoModelForCausalLM, PreTrainedModel

from octavo.kernels.native import library
from octavo.protocol.adapters import NO_ADAPTER
from octavo.protocol.config.lora import ResolvedLoRA
from octavo.worker_proc.lora.loader import AdapterLoader
from octavo.worker_proc.lora.slots import AdapterSlots

TOKENS = prompts(VOCAB_SIZE)
STACKS = ["experts.gate_up_proj", "experts.down_proj"]
SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"target_modules": ["q_proj"], "target_parameters": [*STACKS, "gate.weight"]},
    "downs": {"target_modules": [], "target_parameters": ["down_proj"], "r": 3},
    "ranks": {
        "target_modules": ["o_proj"],
        "target_parameters": STACKS,
        "rank_pattern": {"experts.gate_up_proj": 13},
        "alpha_pattern": {"experts.down_proj": 40},
        "use_rslora": True,
    },
}


CONFIG = ResolvedLoRA(max_loras=3, max_rank=16, max_cpu_loras=3, dtype="float32")


def runner_of(model_path: Path, *, is_native: bool, dtype: torch.dtype = torch.float32) -> tuple[Runner, AdapterLoader]:
    """Return a model with slots for adapters."""
    model = load(model_path, dtype, library.load() if is_native else None)
    config = msgspec.structs.replace(CONFIG, dtype="float32" if dtype == torch.float32 else "bfloat16")
    loader = AdapterLoader(AdapterSlots(model, config), config.max_cpu_loras)
    return Runner(model, dtype), loader


def logits_of(runner: Runner, request: int, slot: int) -> torch.Tensor:
    runner.adapters[request] = slot
    return runner.in_chunks(TOKENS, request, [len(TOKENS[request])])


def check_merged(runner: Runner, loader: AdapterLoader, alone: Runner, merged: PreTrainedModel, path: Path) -> None:
    """Compare with merged weights, and requests without an adapter with the model alone."""
    assert loader.apply([load_of(path, 1)]) == []
    base = alone.in_chunks(TOKENS, 1, [len(TOKENS[1])])
    assert torch.equal(logits_of(runner, 1, NO_ADAPTER), base)
    assert torch.equal(logits_of(runner, 1, 0), base)  # an empty slot
    with torch.inference_mode():
        expected = merged(TOKENS[1][None]).logits[0].log_softmax(1)
    assert (base.log_softmax(1) - expected).abs().max() > 1e-2
    torch.testing.assert_close(logits_of(runner, 1, 1).log_softmax(1), expected, rtol=1e-4, atol=1e-4)


def both_runners(model_path: Path, *, is_native: bool) -> tuple[Runner, AdapterLoader, Runner]:
    alone = Runner(load(model_path, torch.float32, library.load() if is_native else None), torch.float32)
    return *runner_of(model_path, is_native=is_native), alone


@pytest.mark.parametrize(
    ("family", "settings", "is_native"),
    [
        ("MixtralForCausalLM", "all", True),
        ("Qwen3MoeForCausalLM", "downs", True),
        ("GptOssForCausalLM", "ranks", True),
        ("Qwen3MoeForCausalLM", "all", False),
        pytest.param("Qwen3MoeForCausalLM", "ranks", True, marks=pytest.mark.long),
        pytest.param("OlmoeForCausalLM", "all", True, marks=pytest.mark.long),
        pytest.param("MixtralForCausalLM", "ranks", False, marks=pytest.mark.long),
    ],
)
def test_stacked_weights(family: str, settings: str, is_native: bool, tmp_path: Path) -> None:
    model_path = make_tiny(family, tmp_path / "model")
    merged = write_adapter(model_path, tmp_path / "adapter", **SETTINGS[settings])
    check_merged(*both_runners(model_path, is_native=is_native), merged, tmp_path / "adapter")


def write_by_expert(model_path: Path, path: Path, names: Mapping[str, str], seed: int = 0) -> PreTrainedModel:
    """Write an adapter with a module for each expert, as transformers 4 had them; return the model merged with it.

    `names`: where a block has its experts, and what it calls gates, ups and downs.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    noise, rank, tensors = torch.Generator().manual_seed(seed), 5, {}
    for index, layer in enumerate(model.model.layers):
        gates_and_ups, downs = layer.mlp.experts.gate_up_proj.data, layer.mlp.experts.down_proj.data
        inner = downs.shape[2]
        for expert in range(len(downs)):
            if (index + expert) % 3 == 0:
                continue
            weights = {"up": gates_and_ups[expert, inner:], "down": downs[expert]}
            weights |= {"gate": gates_and_ups[expert, :inner]} if expert % 2 else {}
            for part, weight_OI in weights.items():
                a_RI = torch.randn(rank, weight_OI.shape[1], generator=noise) * weight_OI.shape[1] ** -0.5
                b_OR = torch.randn(len(weight_OI), rank, generator=noise) * rank**-0.5
                name = f"base_model.model.model.layers.{index}.{names['block']}.experts.{expert}.{names[part]}"
                tensors |= {f"{name}.lora_A.weight": a_RI, f"{name}.lora_B.weight": b_OR}
                weight_OI += 3.0 * b_OR @ a_RI
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    targets = [names["gate"], names["up"], names["down"]]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 3 * rank, "target_modules": targets}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return model


@pytest.mark.parametrize(
    ("arch", "names"),
    [
        ("MixtralForCausalLM", {"block": "block_sparse_moe", "gate": "w1", "up": "w3", "down": "w2"}),
        ("Qwen3MoeForCausalLM", {"block": "mlp", "gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
    ],
)
def test_a_module_for_each_expert(arch: str, names: Mapping[str, str], tmp_path: Path) -> None:
    model_path = make_tiny(arch, tmp_path / "model")
    merged = write_by_expert(model_path, tmp_path / "adapter", names)
    check_merged(*both_runners(model_path, is_native=True), merged, tmp_path / "adapter")


def turn(path: Path) -> None:
    """Write the factors of stacks in the order of peft 0.18: A of the outputs, B of the inputs."""
    file, config_file = path / "adapter_model.safetensors", path / "adapter_config.json"
    config, tensors = json.loads(config_file.read_text()), load_file(file)
    turned = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            turned[name] = tensor
        elif "lora_A" in name:  # E R I -> I R E
            turned[name.replace("lora_A", "lora_B")] = (
                tensor.unflatten(0, (-1, config["r"])).permute(2, 1, 0).flatten(1)
            )
        else:  # O R E -> E R O
            turned[name.replace("lora_B", "lora_A")] = (
                tensor.unflatten(1, (config["r"], -1)).permute(2, 1, 0).flatten(0, 1)
            )
    save_file({name: tensor.contiguous() for name, tensor in turned.items()}, file)
    config_file.write_text(json.dumps({**config, "peft_version": "0.18.1"}))


def test_the_order_of_earlier_versions(tmp_path: Path) -> None:
    model_path = make_tiny("Qwen3MoeForCausalLM", tmp_path / "model")
    merged = write_adapter(model_path, tmp_path / "adapter", target_modules=["q_proj"], target_parameters=STACKS)
    turn(tmp_path / "adapter")
    check_merged(*both_runners(model_path, is_native=True), merged, tmp_path / "adapter")
    square = make_tiny("Qwen3MoeForCausalLM", tmp_path / "square", moe_intermediate_size=48)
    write_adapter(square, tmp_path / "of square", target_modules=[], target_parameters=["experts.down_proj"])
    turn(tmp_path / "of square")
    _, loader = runner_of(square, is_native=True)
    (fault,) = loader.apply([load_of(tmp_path / "of square")])
    assert "the square weights 'model.layers." in fault.message and "0.18.1" in fault.message


def test_damage_is_named(tmp_path: Path) -> None:
    model_path, path = make_tiny("Qwen3MoeForCausalLM", tmp_path / "model"), tmp_path / "adapter"
    write_adapter(model_path, path, target_modules=[], target_parameters=STACKS)
    _, loader = runner_of(model_path, is_native=True)
    assert loader.apply([load_of(path)]) == []
    file, tensors = path / "adapter_model.safetensors", load_file(path / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
    for value, problem in ((tensors[name][1:], "gives it the rank 8"), (tensors[name][8:], "a B of 8")):
        save_file({**tensors, name: value.contiguous()}, file)
        (fault,) = loader.apply([load_of(path)])
        assert problem in fault.message and "model.layers.0.mlp.experts" in fault.message, fault.message
    save_file(tensors, file)
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, "target_parameters": ["experts.down_proj"]}))
    assert "target_parameters does not name" in loader.apply([load_of(path)])[0].message
    dense = make_tiny("Qwen3ForCausalLM", tmp_path / "dense")
    _, loader = runner_of(dense, is_native=True)
    save_file({key: value for key, value in tensors.items() if "base_layer" not in key}, file)
    assert "not a linear layer of this model" in loader.apply([load_of(path)])[0].message


@pytest.mark.parametrize(
    ("dtype", "is_native"),
    [(torch.bfloat16, True), pytest.param(torch.float32, False, marks=pytest.mark.long)],
)
def test_neighbours_do_not_change_a_bit(dtype: torch.dtype, is_native: bool, tmp_path: Path) -> None:
    model_path = make_tiny("Qwen3MoeForCausalLM", tmp_path / "model")
    for seed, settings in enumerate(({"r": 16}, {"r": 3}, {"target_parameters": ["gate.weight"], "r": 4})):
        write_adapter(model_path, tmp_path / str(seed), seed, **{**SETTINGS["all"], **settings})
    runner, loader = runner_of(model_path, is_native=is_native, dtype=dtype)
    assert loader.apply([load_of(tmp_path / str(slot), slot) for slot in range(3)]) == []
    alone = {(request, slot): logits_of(runner, request, slot) for request in range(3) for slot in range(NO_ADAPTER, 3)}
    noise = torch.Generator().manual_seed(3)
    for _ in range(5):
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
