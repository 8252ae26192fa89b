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
from worker_plans import worker_config

from octavo.kernels.linear import Packer
from octavo.kernels.linear.native import NativeProduct
from octavo.kernels.native import library
from octavo.protocol.config import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.registry import build_model
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.weights.gguf import read_gguf
from octavo.worker_proc.weights.gguf_blocks import GgufMatrix, dequantized
from octavo.worker_proc.weights.reader import read_weights

SIMPLE = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]
K_QUANTS = [Type.Q4_K, Type.Q5_K, Type.Q6_K]

ARCHITECTURES = {
    "LlamaForCausalLM": ("llama", 6, 2),
    "Qwen2ForCausalLM": ("qwen2", 6, 2),
    "Qwen3ForCausalLM": ("qwen3", 6, 2),
    "GPT2LMHeadModel": ("gpt2", 3, 3),
    "MixtralForCausalLM": ("llama", 6, 2),
    "Qwen2MoeForCausalLM": ("qwen2moe", 6, 2),
    "Qwen3MoeForCausalLM": ("qwen3moe", 6, 2),
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
        ("MixtralForCausalLM", False),
        ("Qwen2MoeForCausalLM", False),
        ("Qwen3MoeForCausalLM", False),
    ],
)
def test_weights_equal_the_original(arch: str, is_tied: bool, tmp_path: Path) -> None:
    model, file = convert(arch, tmp_path, tie_word_embeddings=is_tied)
    facts = worker_config(model).model
    expected = filled(facts)
    got = filled(msgspec.structs.replace(facts, load_format="gguf", model_path=str(file)))
    assert got.keys() == expected.keys()
    assert len(expected) > 10
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def filled(facts: ModelFacts) -> dict[str, torch.Tensor]:
    """Return the tensors of a model that was filled and not yet packed."""
    model = build_model(facts, Placement(torch.float32))
    model.load_weights(read_weights(facts, lambda fraction: None, model.parameters.wants))
    return dict(model.named_parameters())


def read(file: Path) -> dict[str, np.ndarray]:
    """Return what a file holds, in float32."""
    tensors = {name: values for name, values, _ in read_gguf(file)}
    return {
        name: (values if isinstance(values, torch.Tensor) else values.dequantized()).float().numpy()
        for name, values in tensors.items()
    }


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, *SIMPLE])
def test_quantized_files_are_close_to_the_original(kind: Type, tmp_path: Path) -> None:
    model, file = convert("LlamaForCausalLM", tmp_path, kind, hidden_size=96)
    original = load_file(model / "model.safetensors")
    got = read(file)
    assert got.keys() == original.keys()
    steps = {Type.F16: 2**11, Type.BF16: 2**8, Type.Q8_0: 2**7, Type.Q5_0: 2**4, Type.Q5_1: 2**4}.get(kind, 2**3)
    for name, tensor in got.items():
        assert tensor.shape == original[name].shape
        error = np.abs(tensor - original[name]).max()
        assert error <= np.abs(original[name]).max() / steps, name


def test_quantized_experts_stay_quantized(tmp_path: Path) -> None:
    sizes = {"hidden_size": 96, "moe_intermediate_size": 64, "num_experts": 4}
    model, file = convert("Qwen3MoeForCausalLM", tmp_path, Type.Q8_0, **sizes)
    facts = msgspec.structs.replace(worker_config(model).model, load_format="gguf", model_path=str(file))
    kernels = library.load()
    loaded = build_model(facts, Placement(torch.float32))
    loaded.load_weights(read_weights(facts, lambda fraction: None, loaded.parameters.wants))
    loaded.pack(Packer(torch.device("cpu"), kernels), keeps_quantized=True)
    experts = {name: packed for name, packed in loaded.parameters.packed.items() if ".experts." in name}
    assert len(experts) == 2 * 4 * 3
    for packed in experts.values():
        assert isinstance(packed.product, NativeProduct) and packed.product.packed.kind == "u8"
    router = loaded.parameters.packed["layers.0.mlp.gate"].product
    assert isinstance(router, NativeProduct) and router.packed.kind == "f32"


def random_blocks(kind: Type, shape: tuple[int, int]) -> np.ndarray:
    """Return the bytes of rows whose float16 numbers are near 0.01; all other bits are random."""
    num_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    noise = np.random.default_rng(0)
    blocks = noise.integers(0, 256, (shape[0], shape[1] // num_values, block_bytes), dtype=np.uint8)
    if kind is Type.MXFP4:
        blocks[..., 0] = 113 + blocks[..., 0] % 16
        return blocks.reshape(shape[0], -1)
    starts = {Type.Q6_K: [208], Type.Q4_0: [0], Type.Q5_0: [0], Type.Q8_0: [0]}.get(kind, [0, 2])
    for start in starts:
        numbers = noise.uniform(0.005, 0.02, blocks.shape[:2]).astype(np.float16)
        blocks[..., start : start + 2] = numbers[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


@pytest.mark.parametrize("kind", K_QUANTS)
def test_k_quants_are_dequantized_as_the_format_says(kind: Type) -> None:
    rows = random_blocks(kind, (3, 512))
    values = dequantized(rows.reshape(-1), kind)
    expected = [_k_quant_value(bytes(row), i, kind) for row in rows for i in range(512)]
    assert values.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("kind", [*SIMPLE, Type.MXFP4])
def test_levels_and_scales_mean_exactly_what_the_blocks_mean(kind: Type) -> None:
    matrix = GgufMatrix("some", kind, random_blocks(kind, (5, 96)))
    weight = matrix.quantized()
    assert (weight.bits, weight.group_size) == (4 if kind in (Type.Q4_0, Type.Q4_1) else 8, 32)
    assert torch.equal(weight.dequantize(), matrix.dequantized())
    assert torch.equal(matrix.dequantized(), torch.from_numpy(gguf.quants.dequantize(matrix.rows_OB, kind)))


@pytest.mark.parametrize("kind", K_QUANTS)
def test_levels_and_scales_of_k_quants_mean_the_same_but_for_the_rounding_of_scales(kind: Type) -> None:
    matrix = GgufMatrix("some", kind, random_blocks(kind, (5, 768)))
    weight = matrix.quantized()
    assert (weight.bits, weight.group_size) == (4 if kind is Type.Q4_K else 8, 16 if kind is Type.Q6_K else 32)
    levels = (weight.levels_OI.int() - weight.offset).abs()
    size = levels * weight.scale_OG.float().abs().repeat_interleave(weight.group_size, 1)
    if weight.minimum_OG is not None:
        size += weight.minimum_OG.float().abs().repeat_interleave(weight.group_size, 1)
    error = (weight.dequantize() - matrix.dequantized()).abs()
    assert (error <= size * 2**-11 * (1 + 2**-10)).all()
    assert error.any(), "these scales were chosen to need rounding"


@pytest.mark.parametrize("kind", K_QUANTS)
def test_scales_too_large_for_16_bits_have_32(kind: Type) -> None:
    rows = random_blocks(kind, (1, 256))
    start = 208 if kind is Type.Q6_K else 0
    rows[0, start : start + 2] = np.frombuffer(np.float16(30000).tobytes(), np.uint8)
    matrix = GgufMatrix("some", kind, rows)
    weight = matrix.quantized()
    assert weight.scale_OG.dtype == torch.float32
    assert torch.equal(weight.dequantize(), matrix.dequantized())


def test_infinite_scales_are_refused() -> None:
    rows = random_blocks(Type.Q8_0, (1, 32))
    rows[0, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    with pytest.raises(ConfigError, match=r"tensor blk\.0\.some has scales that are not finite"):
        GgufMatrix("blk.0.some", Type.Q8_0, rows).quantized()


@pytest.mark.parametrize("exponent", [0, 50, 150, 200])
def test_exponents_outside_of_16_bits_are_exact(exponent: int) -> None:
    rows = random_blocks(Type.MXFP4, (2, 64))
    rows[0, 0] = exponent
    matrix = GgufMatrix("some", Type.MXFP4, rows)
    weight = matrix.quantized()
    assert weight.scale_OG.dtype == torch.float32
    assert torch.equal(weight.dequantize(), matrix.dequantized())


def test_blocks_of_zeros_need_no_exponent_of_their_own() -> None:
    rows = random_blocks(Type.MXFP4, (2, 64))
    rows[0, :17] = 0  # as ggml writes them
    matrix = GgufMatrix("some", Type.MXFP4, rows)
    weight = matrix.quantized()
    assert weight.scale_OG.dtype == torch.float16
    assert torch.equal(weight.dequantize(), matrix.dequantized())


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
    _, block_bytes = gguf.GGML_QUANT_SIZES[Type.Q8_K]
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((2, block_bytes), np.uint8), raw_dtype=Type.Q8_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_q\.weight in model\.gguf is of type Q8_K"):
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
    ours = read(smollm2_gguf)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_gguf).tensors}
    assert len(ours) == len(theirs) == 272
    for our_name, their_name in [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight"),
        ("model.norm.weight", "output_norm.weight"),
    ]:
        tensor = theirs[their_name]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(ours[our_name], expected)
