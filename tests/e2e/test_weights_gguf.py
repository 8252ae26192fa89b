"""GGUF: every type, every name, the order of the rotary rows, and files that are broken."""

import struct
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_files import write_gguf
from safetensors.numpy import load_file
from tiny_models import make_tiny
from worker_plans import loaded, worker_config

from octavo.protocol.errors import ConfigError
from octavo.worker_proc.weights.gguf import dequantized, read_gguf

ARCHITECTURES = {
    "LlamaForCausalLM": ("llama", 6, 2),
    "Qwen2ForCausalLM": ("qwen2", 6, 2),
    "Qwen3ForCausalLM": ("qwen3", 6, 2),
    "GPT2LMHeadModel": ("gpt2", 3, 3),
}


def convert(arch: str, folder: Path, kind: Type = Type.F32, **overrides: object) -> tuple[Path, Path]:
    """Make a tiny model, and a GGUF file of the same weights."""
    model = make_tiny(arch, folder / "model", **overrides)
    name, num_heads, num_kv_heads = ARCHITECTURES[arch]
    tensors = load_file(model / "model.safetensors")
    file = write_gguf(folder / "model.gguf", name, tensors, num_heads=num_heads, num_kv_heads=num_kv_heads, kind=kind)
    return model, file


@pytest.mark.parametrize(
    ("arch", "is_tied"),
    [
        ("LlamaForCausalLM", True),
        ("LlamaForCausalLM", False),
        ("Qwen2ForCausalLM", True),
        ("Qwen3ForCausalLM", False),
        ("GPT2LMHeadModel", True),
    ],
)
def test_weights_equal_the_original(arch: str, is_tied: bool, tmp_path: Path) -> None:
    model, file = convert(arch, tmp_path, tie_word_embeddings=is_tied)
    config = worker_config(model)
    facts = msgspec.structs.replace(config.model, load_format="gguf", model_path=str(file))
    expected = dict(loaded(config).named_parameters())
    got = dict(loaded(msgspec.structs.replace(config, model=facts)).named_parameters())
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1])
def test_quantized_files_are_close_to_the_original(kind: Type, tmp_path: Path) -> None:
    model, file = convert("LlamaForCausalLM", tmp_path, kind, hidden_size=96)
    original = load_file(model / "model.safetensors")
    got = {name: tensor for name, tensor, _ in read_gguf(file)}
    assert got.keys() == original.keys()
    steps = {Type.F16: 2**11, Type.BF16: 2**8, Type.Q8_0: 2**7, Type.Q5_0: 2**4, Type.Q5_1: 2**4}.get(kind, 2**3)
    for name, tensor in got.items():
        assert tensor.shape == original[name].shape
        error = np.abs(tensor.float().numpy() - original[name]).max()
        assert error <= np.abs(original[name]).max() / steps, name


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q5_K, Type.Q6_K])
def test_k_quants_are_dequantized_as_the_format_says(kind: Type) -> None:
    num_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (3, 2 * block_bytes), dtype=np.uint8)
    half = np.frombuffer(np.float16(0.01).tobytes(), dtype=np.uint8)
    starts = [block_bytes - 2] if kind is Type.Q6_K else [0, 2]
    for block in (0, block_bytes):
        for start in starts:  # random bytes may be no number: give every scale one
            blocks[:, block + start : block + start + 2] = half
    values = dequantized(blocks.reshape(-1), kind)
    expected = [_k_quant_value(bytes(row), i, kind) for row in blocks for i in range(2 * num_values)]
    assert values.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def _k_quant_value(row: bytes, index: int, kind: Type) -> float:
    """One value by the layout of ggml's K-quants, written down from its structs."""
    num_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    block = row[index // num_values * block_bytes :][:block_bytes]
    i = index % num_values
    if kind is Type.Q6_K:
        half, j = divmod(i, 128)
        quarter, lane = divmod(j, 32)
        low = block[half * 64 + lane + 32 * (quarter % 2)] >> (4 * (quarter // 2)) & 15
        high = block[128 + half * 32 + lane] >> (2 * quarter) & 3
        (scale,) = struct.unpack_from("b", block, 192 + i // 16)
        (d,) = struct.unpack_from("<e", block, 208)
        return d * scale * ((low | high << 4) - 32)
    d, d_min = struct.unpack_from("<ee", block)
    scales, j = block[4:16], i // 32
    if j < 4:
        scale, minimum = scales[j] & 63, scales[j + 4] & 63
    else:
        scale = scales[j + 4] & 15 | scales[j - 4] >> 6 << 4
        minimum = scales[j + 4] >> 4 | scales[j] >> 6 << 4
    quants = block[16:] if kind is Type.Q4_K else block[48:]
    value = quants[i // 64 * 32 + i % 32] >> (4 * (j % 2)) & 15
    if kind is Type.Q5_K:
        value |= (block[16 + i % 32] >> j & 1) << 4
    return d * scale * value - d_min * minimum


def test_unsupported_types_are_named_with_their_tensor(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    _, block_bytes = gguf.GGML_QUANT_SIZES[Type.Q2_K]
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((2, block_bytes), np.uint8), raw_dtype=Type.Q2_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_q\.weight in model\.gguf is of type Q2_K"):
        list(read_gguf(tmp_path / "model.gguf"))


def test_unknown_architectures_and_tensors_are_named(tmp_path: Path) -> None:
    for architecture, message in [("mamba", "'mamba' is not supported"), ("llama", "tensor blk.0.ssm_in.weight")]:
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
        writer.add_tensor("blk.0.ssm_in.weight", np.zeros((2, 2), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ConfigError, match=message):
            list(read_gguf(tmp_path / "model.gguf"))


def header_with_alignment(alignment: int) -> bytes:
    """A file without tensors whose metadata is its alignment."""
    key = b"general.alignment"
    return b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + struct.pack("<II", 4, alignment)


def test_broken_files_say_how_they_are_broken(tmp_path: Path) -> None:
    _, file = convert("LlamaForCausalLM", tmp_path)
    content = file.read_bytes()
    broken = tmp_path / "broken.gguf"
    for damaged, message in [
        (content[:-100], "is cut short: tensor .* ends at byte"),
        (content[:300], "ends inside its header, after 300 bytes"),
        (b"PK\x03\x04" + content[4:], "is not a GGUF file"),
        (content[:4] + b"\x01\0\0\0" + content[8:], "is of GGUF version 1"),
        (content[:24] + b"\xff" * 8 + content[32:], "ends inside its header"),
        (header_with_alignment(0), "its general.alignment is 0"),
        (b"", "cannot read"),
    ]:
        broken.write_bytes(damaged)
        with pytest.raises(ConfigError, match=message):
            list(read_gguf(broken))
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        list(read_gguf(tmp_path / "missing.gguf"))


@pytest.mark.model
def test_the_default_model_reads_as_the_gguf_package_reads_it(smollm2_gguf: Path) -> None:
    ours = {name: tensor for name, tensor, _ in read_gguf(smollm2_gguf)}
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_gguf).tensors}
    assert len(ours) == len(theirs) == 272
    for our_name, their_name in [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight"),
        ("model.norm.weight", "output_norm.weight"),
    ]:
        tensor = theirs[their_name]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(ours[our_name].numpy(), expected)
