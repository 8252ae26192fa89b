"""Weights of a model that are exchanged in a worker: the bits of a model that was loaded with them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny

from octavo.frontend.model_files import read_model_facts
from octavo.kernels.native import library
from octavo.protocol.config import ResolvedConfig, resolve
from octavo.protocol.config.sources import engine_config
from octavo.protocol.env import Env
from octavo.protocol.steps import LoadWeights
from octavo.worker_proc.live_model import LiveModel
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.weights.load import load_model


def config_of(path: Path, **settings) -> ResolvedConfig:
    given = engine_config({"model": str(path), **settings})
    return resolve(given, read_model_facts(given.model, Env.read()), device="cpu", num_cores=1)


def weights_of(model: Model) -> dict[str, torch.Tensor]:
    """Return all bytes that steps read."""
    found = dict(model.parameters.tensors)
    for name, packed in model.parameters.packed.items():
        if (native := getattr(packed.product, "packed", None)) is not None:
            found |= {f"{name} {key}": buffer for key, buffer in native.to_buffers()[1].items()}
    return found


def require_same(model: Model, other: Model) -> None:
    ours, theirs = weights_of(model), weights_of(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def live(config: ResolvedConfig, kernels) -> LiveModel:
    return LiveModel(config, load_model(config, lambda fraction: None, library=kernels), lambda model: None)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Return two checkpoints of each of several kinds of models."""
    found = {}
    for architecture in ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM", "GPT2LMHeadModel"):
        path = make_tiny(architecture, tmp_path_factory.mktemp(architecture))
        other = tmp_path_factory.mktemp(f"{architecture}-other")
        for file in path.iterdir():
            if file.suffix != ".safetensors":
                (other / file.name).write_bytes(file.read_bytes())
        tensors = load_file(path / "model.safetensors")
        save_file(
            {name: (tensor * 1.25 + 0.01).contiguous() for name, tensor in tensors.items()}, other / "model.safetensors"
        )
        found[architecture] = path
        found[f"{architecture} other"] = other
    return found


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("LlamaForCausalLM", {"dtype": "bfloat16"}),
        ("LlamaForCausalLM", {"dtype": "float32", "quantization": "int8"}),
        ("Qwen3MoeForCausalLM", {"dtype": "bfloat16"}),
        ("DeepseekV2ForCausalLM", {"dtype": "float32"}),
        ("GPT2LMHeadModel", {"dtype": "float32"}),
    ],
)
def test_an_update_leaves_the_bytes_of_a_fresh_model(models, architecture, settings):
    kernels = library.load()
    config = config_of(models[architecture], **settings)
    other = models[f"{architecture} other"]
    updated = live(config, kernels)
    assert updated.load(LoadWeights(0, str(other), is_check=True), in_place=False) == ("", "")
    fault, digest = updated.load(LoadWeights(0, str(other)), in_place=False)
    assert not fault and digest
    fresh = load_model(config_of(other, **settings), lambda fraction: None, library=kernels)
    require_same(updated.model, fresh)


def test_a_partial_update_changes_what_it_has(models, tmp_path):
    kernels, path = library.load(), models["LlamaForCausalLM"]
    config = config_of(path, dtype="float32")
    tensors = load_file(path / "model.safetensors")
    names = ["model.norm.weight", "model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"]
    changed = {name: tensors[name] * 2 for name in names}
    save_file(changed, tmp_path / "part.safetensors")
    updated = live(config, kernels)
    assert updated.load(LoadWeights(0, str(tmp_path), is_partial=True), in_place=False)[0] == ""
    whole = tmp_path / "whole"
    whole.mkdir()
    for file in path.iterdir():
        (whole / file.name).write_bytes(file.read_bytes())
    save_file({**tensors, **changed}, whole / "model.safetensors")
    fresh = load_model(config_of(whole, dtype="float32"), lambda fraction: None, library=kernels)
    require_same(updated.model, fresh)


@pytest.mark.parametrize(
    ("change", "is_partial", "expected"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), False, "lacks 1 tensors"),
        (lambda tensors: tensors.update(strange=torch.ones(2)), False, "'strange', which this architecture"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(2)}),
            False,
            "has shape .2,. in the checkpoint",
        ),
        (lambda tensors: tensors.pop("model.layers.0.self_attn.k_proj.weight"), True, "packed together"),
    ],
    ids=["missing", "unknown", "shape", "fused"],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(models, tmp_path, change, is_partial, expected):
    path = models["LlamaForCausalLM"]
    config = config_of(path, dtype="float32")
    tensors = load_file(models["LlamaForCausalLM other"] / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    updated = live(config, library.load())
    fault, _ = updated.load(LoadWeights(0, str(tmp_path), is_partial=is_partial), in_place=False)
    import re

    assert re.search(expected, fault), fault
    require_same(updated.model, load_model(config, lambda fraction: None, library=library.load()))
