"""Files of `torch.save` and of Mistral's own format give the tensors of safetensors; what is wrong is named."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from worker_plans import worker_config

from octavo.protocol.config import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.protocol.weight_files import weight_files
from octavo.worker_proc.models.registry import build_model
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.weights.mistral import SUPPORTED_ARCHITECTURES, hf_name
from octavo.worker_proc.weights.pytorch import read_pytorch
from octavo.worker_proc.weights.reader import read_weights

INDEX = "pytorch_model.bin.index.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny("LlamaForCausalLM", tmp_path / "model")


def filled(facts: ModelFacts) -> dict[str, torch.Tensor]:
    model = build_model(facts, Placement(torch.float32))
    model.load_weights(read_weights(facts, lambda fraction: None, model.parameters.wants))
    return dict(model.named_parameters())


def pickled(model: Path, *, shards: int = 1, **settings: Any) -> dict[str, torch.Tensor]:
    """Replace the safetensors file by files of `torch.save`, with an index if there are several."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    weight_map = {}
    for number in range(shards):
        name = "pytorch_model.bin" if shards == 1 else f"pytorch_model-{number + 1:05}-of-{shards:05}.bin"
        part = dict(list(tensors.items())[number::shards])
        torch.save({name: torch.nn.Parameter(tensor) for name, tensor in part.items()}, model / name, **settings)
        weight_map |= dict.fromkeys(part, name)
    if shards > 1:
        (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def read(model: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor, _ in read_pytorch(weight_files(model, "pt"))}


@pytest.mark.parametrize(("shards", "settings"), [(1, {}), (3, {}), (1, {"_use_new_zipfile_serialization": False})])
def test_pytorch_files_hold_the_tensors_of_safetensors(shards: int, settings: dict[str, Any], model: Path) -> None:
    expected = filled(worker_config(model).model)
    pickled(model, shards=shards, **settings)
    facts = worker_config(model).model
    assert facts.load_format == "pt"
    got = filled(facts)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_tensors_are_views_of_the_mapped_file(model: Path) -> None:
    pickled(model)
    mapped = read(model)
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in maps if line.endswith("pytorch_model.bin")]
    for name, tensor in mapped.items():
        assert any(int(start, 16) <= tensor.data_ptr() < int(end, 16) for start, end in ranges), name


class Attack:
    """Writes a file if it is restored."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.path),)


def test_code_is_refused_and_not_run(model: Path, tmp_path: Path) -> None:
    tensors = pickled(model)
    torch.save({**tensors, "attack": Attack(tmp_path / "ran")}, model / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin holds objects whose code would have to run") as caught:
        read(model)
    assert "save_pretrained" in caught.value.hint
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Attack(tmp_path / "ran"), protocol=2))
    with pytest.raises(ConfigError, match="pytorch_model"):
        read(model)
    assert not (tmp_path / "ran").exists()


def test_what_is_wrong_is_named(model: Path) -> None:
    tensors = pickled(model)
    file = model / "pytorch_model.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-500])
    with pytest.raises(ConfigError, match=r"cannot read .*pytorch_model\.bin \(\d+ bytes\): "):
        read(model)
    file.write_bytes(b"nonsense")
    with pytest.raises(
        ConfigError, match=r"cannot read .*pytorch_model\.bin \(8 bytes\): it is not a file of torch\.save"
    ):
        read(model)
    torch.save([1, 2], file)
    with pytest.raises(ConfigError, match="holds list; expected tensors by name"):
        read(model)
    torch.save({"step": 3, **tensors}, file)
    with pytest.raises(ConfigError, match="holds something else than tensors"):
        read(model)


def test_missing_shards_and_tensors_are_named(model: Path) -> None:
    pickled(model, shards=3)
    second = "pytorch_model-00002-of-00003.bin"
    torch.save({"other": torch.zeros(2)}, model / second)
    with pytest.raises(ConfigError, match=rf"{second} lacks \d+ tensors that {INDEX} expects"):
        read(model)
    (model / second).unlink()
    with pytest.raises(ConfigError, match=rf"1 of 3 weight files named in {INDEX} are missing from .*: {second}"):
        read(model)


HF_TO_MISTRAL = {
    "model.embed_tokens.": "tok_embeddings.",
    "model.norm.": "norm.",
    "lm_head.": "output.",
    "model.layers.": "layers.",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "block_sparse_moe.": "feed_forward.",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}


def to_mistral(model: Path, *, shards: int = 1) -> None:
    """Replace the files of a Mistral or Mixtral in Hugging Face layout by those of Mistral's own."""
    config = json.loads((model / "config.json").read_text())
    tensors = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        for part, heads in (("q_proj", config["num_attention_heads"]), ("k_proj", config["num_key_value_heads"])):
            if part in name:
                pairs = tensor.unflatten(0, (heads, 2, -1))  # of a row and the one half a head below
                tensor = pairs.transpose(1, 2).reshape(tensor.shape).contiguous()
        for theirs, ours in HF_TO_MISTRAL.items():
            name = name.replace(theirs, ours)
        tensors[name] = tensor
    params = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "head_dim": config["head_dim"],
        "hidden_dim": config["intermediate_size"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "max_seq_len": config["max_position_embeddings"],
    }
    if "num_local_experts" in config:
        params["moe"] = {key: config[ours] for key, ours in MOE.items()}
    (model / "params.json").write_text(json.dumps(params))
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        (model / file).unlink()
    for number in range(shards):
        name = "consolidated" if shards == 1 else f"consolidated-{number + 1:05}-of-{shards:05}"
        save_file(dict(list(tensors.items())[number::shards]), model / f"{name}.safetensors")


MOE = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}


@pytest.mark.parametrize(
    ("architecture", "shards"), [("MistralForCausalLM", 1), ("MistralForCausalLM", 2), ("MixtralForCausalLM", 1)]
)
def test_mistral_files_hold_the_tensors_of_safetensors(architecture: str, shards: int, tmp_path: Path) -> None:
    model = make_tiny(architecture, tmp_path / "model")
    original = worker_config(model).model
    expected = filled(original)
    to_mistral(model, shards=shards)
    facts = worker_config(model, dtype="float32").model
    assert (facts.load_format, facts.architecture) == ("mistral", architecture)
    same = ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_position_embeddings")
    assert all(getattr(facts, name) == getattr(original, name) for name in same)
    got = filled(facts)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_every_architecture_of_mistral_is_tested() -> None:
    assert {"MistralForCausalLM", "MixtralForCausalLM"} == SUPPORTED_ARCHITECTURES


def test_unknown_tensors_of_mistral_are_named() -> None:
    for name in ("vision_encoder.ln_pre.weight", "layers.0.attention.wq.qscale_weight", "layers.0.other.weight"):
        with pytest.raises(ConfigError, match=f"tensor '{name}' is unknown in Mistral's format"):
            hf_name(name)


def test_tensors_of_another_shape_are_named_with_both(model: Path) -> None:
    facts = worker_config(model).model
    other = msgspec.structs.replace(facts, hf_config={**facts.hf_config, "intermediate_size": 80})
    with pytest.raises(ConfigError, match=r"mlp\.\w+_proj\.weight' has shape .*; its config\.json asks for"):
        filled(other)
