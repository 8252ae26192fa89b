"""scripts/make_bf16_checkpoint.py: the same weights in two formats."""

from pathlib import Path
from typing import Any

import make_bf16_checkpoint as script
import msgspec
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from octavo.frontend.model_files import read_model_facts
from octavo.protocol.config import ModelConfig
from octavo.protocol.env import Env

TINY = script.Shape(2, 64, 96, 4, 2, vocab_size=300, max_positions=128)
TOKENS = [*map(chr, range(0x100, 0x1FF)), chr(0x100) + chr(0x101)]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


def write_donor(path: Path, weights: dict[str, np.ndarray] | None = None) -> Path:
    """Write a llama model with a tokenizer of 256 tokens; its matrices in 4 bits."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * len(TOKENS))
    writer.add_token_merges([f"{TOKENS[0]} {TOKENS[1]}"])
    writer.add_eos_token_id(2)
    for name, values in (weights or {}).items():
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantize(values, GGMLQuantizationType.Q4_1), raw_dtype=GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_gguf(path: Path) -> dict[str, torch.Tensor]:
    return {
        tensor.name: torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        for tensor in GGUFReader(path).tensors
    }


def facts(path: Path) -> dict[str, Any]:
    """Return what octavo knows of a model, without where it lies and how it is stored."""
    known = msgspec.to_builtins(read_model_facts(ModelConfig(model=str(path)), Env.read()))
    return {name: value for name, value in known.items() if name not in ("model_path", "tokenizer_path", "load_format")}


def test_random_weights_are_the_same_in_both_formats(tmp_path: Path) -> None:
    gguf, directory = tmp_path / "tiny.gguf", tmp_path / "tiny"
    script.write_random(TINY, write_donor(tmp_path / "donor.gguf"), gguf)
    script.write_checkpoint(gguf, directory)
    ours, theirs = load_file(directory / "model.safetensors"), read_gguf(gguf)
    assert len(ours) == len(theirs) == 2 + 2 * 12
    pairs = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.1.self_attn.q_proj.weight": "blk.1.attn_q.weight",
        "model.layers.0.self_attn.v_proj.bias": "blk.0.attn_v.bias",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
    }
    for one, other in pairs.items():
        assert ours[one].dtype == torch.bfloat16
        assert torch.equal(ours[one].float(), theirs[other])
    assert ours["model.layers.1.self_attn.k_proj.weight"].shape == (32, 64)
    assert 0.015 < ours["model.embed_tokens.weight"].float().std() < 0.025
    assert facts(gguf) == facts(directory)
    assert facts(directory)["vocab_size"] == 300


def test_random_experts_are_the_same_in_both_formats(tmp_path: Path) -> None:
    shape = script.Shape(
        2, 64, 96, 4, 2, vocab_size=300, max_positions=128, num_experts=3, experts_per_token=2, expert_size=32
    )
    gguf, directory = tmp_path / "tiny.gguf", tmp_path / "tiny"
    script.write_random(shape, write_donor(tmp_path / "donor.gguf"), gguf)
    script.write_checkpoint(gguf, directory)
    ours, theirs = load_file(directory / "model.safetensors"), read_gguf(gguf)
    assert torch.equal(
        ours["model.layers.1.mlp.experts.2.down_proj.weight"].float(), theirs["blk.1.ffn_down_exps.weight"][2]
    )
    assert len(ours) == 2 + 2 * (9 + 3 * 3)
    known = facts(directory)
    assert facts(gguf) == known
    assert known["architecture"] == "Qwen3MoeForCausalLM" and known["hf_config"]["num_experts_per_tok"] == 2


def test_a_quantized_model_is_copied_with_its_rotary_rows_in_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    query, norm = rng.normal(size=(64, 64)).astype(np.float32), rng.normal(size=64).astype(np.float32)
    source = write_donor(tmp_path / "q4.gguf", {"blk.0.attn_q.weight": query, "blk.0.attn_norm.weight": norm})
    gguf, directory = tmp_path / "bf16.gguf", tmp_path / "bf16"
    script.copy_as_bf16(source, gguf)
    kinds = {tensor.name: tensor.tensor_type for tensor in GGUFReader(gguf).tensors}
    assert kinds == {
        "blk.0.attn_q.weight": GGMLQuantizationType.BF16,
        "blk.0.attn_norm.weight": GGMLQuantizationType.F32,
    }
    original, copied = read_gguf(source), read_gguf(gguf)
    for name, values in original.items():
        assert torch.equal(copied[name], values.to(torch.bfloat16).float())
    assert GGUFReader(gguf).fields["tokenizer.ggml.tokens"].contents() == TOKENS

    script.write_checkpoint(gguf, directory)
    rows = load_file(directory / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"].float()
    stored = copied["blk.0.attn_q.weight"]
    # A head's rows 2i and 2i + 1 in ggml are its rows i and i + half.
    assert torch.equal(rows[:8], stored[:16:2])
    assert torch.equal(rows[8:16], stored[1:16:2])


def test_it_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    donor = write_donor(tmp_path / "donor.gguf")
    (tmp_path / "cache" / "models").mkdir(parents=True)
    monkeypatch.setattr(script.fetch_default_model, "fetch", lambda: donor)
    monkeypatch.setattr(script, "SHAPES", {"tiny": TINY})
    model = script.make("tiny")
    stamps = [model.gguf.stat().st_mtime_ns, model.directory.stat().st_mtime_ns]
    assert script.make("tiny") == model
    assert [model.gguf.stat().st_mtime_ns, model.directory.stat().st_mtime_ns] == stamps
    assert sorted(path.name for path in model.gguf.parent.iterdir()) == [model.directory.name, model.gguf.name]
