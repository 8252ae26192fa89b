"""Tensors that a checkpoint lacks are named as checkpoints of their kind name them; and those that it has too many."""

import json
import re
from pathlib import Path

import pytest
import torch
from model_runner import facts_of
from safetensors.torch import load_file, save_file
from tiny_fallback import FALLBACKS
from tiny_families import FAMILIES
from tiny_models import make_tiny
from torch import Tensor
from worker_plans import loaded, worker_config

from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models import registry
from octavo.worker_proc.models.registry import build_model
from octavo.worker_proc.parallel.placement import Placement

STACKS = {
    "GptOssForCausalLM": ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"),
    "GraniteMoeForCausalLM": ("input_linear.weight", "output_linear.weight"),
    "DeepseekV2ForCausalLM": ("kv_b_proj.weight",),
    "Qwen3MoeForCausalLM": ("mlp.experts.5.up_proj.weight", "self_attn.k_proj.weight"),
    "phi3": ("qkv_proj.weight", "gate_up_proj.weight"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("missing")


def tiny(name: str, root: Path) -> Path:
    arch, class_name, settings = (FALLBACKS | FAMILIES).get(name, (name, None, {}))
    directory = root / name
    return directory if directory.exists() else make_tiny(arch, directory, class_name=class_name, **settings)


def lacking(path: Path, weights: dict[str, Tensor], pattern: str) -> tuple[list[str], str]:
    """Return the names of the tensors that match, and the error of a checkpoint without them."""
    names = sorted(name for name in weights if re.search(pattern, name))
    model = build_model(facts_of(path), Placement(torch.float32))
    with pytest.raises(ConfigError, match="the checkpoint lacks") as caught:
        model.load_weights((name, tensor) for name, tensor in weights.items() if name not in names)
    return names, caught.value.message


@pytest.mark.parametrize(("family", "tensor"), [(family, name) for family, names in STACKS.items() for name in names])
def test_a_tensor_of_one_layer(family: str, tensor: str, root: Path) -> None:
    path = tiny(family, root)
    weights = load_file(path / "model.safetensors")
    names, message = lacking(path, weights, rf"layers\.1\..*{re.escape(tensor)}$")
    assert len(names) == 1
    assert message == f"the checkpoint lacks 1 tensors of this architecture: {names[0]}"


@pytest.mark.parametrize("family", ["GptOssForCausalLM", "GraniteMoeForCausalLM", "DeepseekV2ForCausalLM"])
def test_tensors_of_all_layers(family: str, root: Path) -> None:
    path = tiny(family, root)
    weights = load_file(path / "model.safetensors")
    names, message = lacking(path, weights, rf"\.{re.escape(STACKS[family][0])}$")
    some = ", ".join(name.removeprefix("model.") for name in names[:4])
    assert message == f"the checkpoint lacks {len(names)} tensors of this architecture: {some}"


@pytest.mark.parametrize("kind", ["blocks", "scales"])
def test_one_of_a_pair(kind: str, root: Path) -> None:
    path = tiny("GptOssForCausalLM", root)
    weights = load_file(path / "model.safetensors")
    for layer in range(4):
        name = f"model.layers.{layer}.mlp.experts.down_proj"
        del weights[name]
        weights[f"{name}_blocks"] = torch.zeros(5, 48, 3, 16, dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.zeros(5, 48, 3, dtype=torch.uint8)
    names, message = lacking(path, weights, rf"layers\.2\..*down_proj_{kind}")
    assert message == f"the checkpoint lacks 1 tensors of this architecture: {names[0]}"


@pytest.mark.parametrize("tensor", [r"experts\.3\.up_proj", r"experts\.\d+\.up_proj", r"experts\.\d+\.down_proj"])
def test_experts_of_the_fallback(tensor: str, root: Path) -> None:
    path = tiny("flex-olmo", root)
    names, message = lacking(path, load_file(path / "model.safetensors"), rf"layers\.1\..*{tensor}")
    assert f"lacks {len(names)} tensors of this architecture: {names[0]}" in message


def test_experts_that_all_layers_lack(root: Path) -> None:
    path = tiny("flex-olmo", root)
    weights = load_file(path / "model.safetensors")
    model = build_model(facts_of(path), Placement(torch.float32))
    with pytest.raises(ConfigError, match=r"become 'model\.layers\.0\.mlp\.experts\.gate_up_proj' do not fit together"):
        model.load_weights((name, tensor) for name, tensor in weights.items() if "experts.3.up_proj" not in name)


def test_a_tensor_that_only_the_fallback_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed-OSS has biases unless config.json says otherwise; Llama has none."""
    arch, class_name, settings = FALLBACKS["seed-oss"]
    path = make_tiny(arch, tmp_path / "seed-oss", class_name=class_name, **settings)
    config = json.loads((path / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in ("attention_bias", "attention_out_bias")}
    (path / "config.json").write_text(json.dumps(kept))
    monkeypatch.setitem(registry.ARCHITECTURES, arch, registry.ARCHITECTURES["LlamaForCausalLM"])
    with pytest.raises(ConfigError, match=r"holds '.*k_proj\.bias', which") as caught:
        loaded(worker_config(path))
    assert "--model-impl transformers" in caught.value.hint
    weights = load_file(path / "model.safetensors")
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith(".bias")}
    save_file({**weights, "model.surprise": torch.zeros(1)}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"holds 'model\.surprise', which") as caught:
        loaded(worker_config(path))
    assert "--model-impl" not in caught.value.hint
