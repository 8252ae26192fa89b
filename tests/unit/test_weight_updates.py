"""Weights of a model that are exchanged in a worker: the bits of a model that was loaded with them."""

import re
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
from octavo.protocol.worker_commands import LoadWeights
from octavo.worker_proc.live_model import LiveModel
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.registry import build_model
from octavo.worker_proc.weights.load import load_model, packer_of
from octavo.worker_proc.weights.transfer import WeightReceiver
from octavo.worker_proc.weights.update import WeightStore, check_update, overwrite
from octavo.worker_proc.weights.update_source import Checkpoint, facts_of_update


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


def make_copy(path: Path, folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write the same model with other weights."""
    folder.mkdir(exist_ok=True)
    for file in path.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(tensors, folder / "model.safetensors")
    return folder


def live(config: ResolvedConfig, kernels) -> LiveModel:
    model = load_model(config, lambda fraction: None, library=kernels)
    return LiveModel(config, model, lambda model: None, WeightReceiver(0, torch.device("cpu")))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Return two checkpoints of each of several kinds of models."""
    found = {}
    for architecture in ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM", "GPT2LMHeadModel"):
        path = make_tiny(architecture, tmp_path_factory.mktemp(architecture))
        tensors = load_file(path / "model.safetensors")
        other = {name: (tensor * 1.25 + 0.01).contiguous() for name, tensor in tensors.items()}
        found[architecture] = path
        folder = tmp_path_factory.mktemp(f"{architecture}-other")
        found[f"{architecture} other"] = make_copy(path, folder, other)
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
    whole = make_copy(path, tmp_path / "whole", {**tensors, **changed})
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
    assert re.search(expected, fault), fault
    require_same(updated.model, load_model(config, lambda fraction: None, library=library.load()))


@pytest.mark.parametrize("is_partial", [False, True])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "GPT2LMHeadModel"])
def test_weights_that_graphs_know_stay_where_they_are(models, tmp_path, architecture, is_partial):
    """As on a GPU; float32 weights are packed in one size."""
    path, other = models[architecture], models[f"{architecture} other"]
    config, kernels = config_of(path, dtype="float32"), library.load()
    tensors = load_file(path / "model.safetensors")
    changed = load_file(other / "model.safetensors")
    if is_partial:
        changed = {name: changed[name] for name in list(changed) if "embed" in name or "norm" in name or ".wte" in name}
        save_file(changed, tmp_path / "part.safetensors")
        whole = make_copy(path, tmp_path / "whole", {**tensors, **changed})
    model = load_model(config, lambda fraction: None, library=kernels)
    before = {name: tensor.data_ptr() for name, tensor in weights_of(model).items()}
    with torch.inference_mode():
        placement = model.parameters.placement
        source = Checkpoint(facts_of_update(config, tmp_path if is_partial else other))
        update = check_update(config, placement, source, is_partial=is_partial)
        overwrite(config, model, update, packer_of(config, placement.device, kernels))
    assert {name: tensor.data_ptr() for name, tensor in weights_of(model).items()} == before
    fresh = config_of(whole if is_partial else other, dtype="float32")
    require_same(model, load_model(fresh, lambda fraction: None, library=kernels))


def test_weights_move_to_the_host_and_back(models):
    """As in a sleep of level 1 on a GPU, without the device."""
    config, kernels = config_of(models["GPT2LMHeadModel"], dtype="float32"), library.load()
    model = load_model(config, lambda fraction: None, library=kernels)
    placement = model.parameters.placement
    with torch.inference_mode():
        store = WeightStore.of(model)
        store.to(torch.device("cpu"))
        again = build_model(config.model, placement)
        again.parameters.adopt(store.tensors, store.packed)
    require_same(again, load_model(config, lambda fraction: None, library=kernels))
    with pytest.raises(AssertionError, match="is not packed yet"):
        weights_of(model)


@pytest.mark.parametrize("level", [1, 2])
def test_a_model_without_weights_can_sleep(models, level):
    """A load that failed midway leaves no weights."""
    config, other = config_of(models["GPT2LMHeadModel"], dtype="float32"), models["GPT2LMHeadModel other"]
    kernels = library.load()
    updated = live(config, kernels)
    updated.release(2)
    updated.release(level)
    updated.restore()
    assert not updated.has_weights
    assert updated.load(LoadWeights(0, str(other)), in_place=False)[0] == ""
    fresh = load_model(config_of(other, dtype="float32"), lambda fraction: None, library=kernels)
    require_same(updated.model, fresh)
