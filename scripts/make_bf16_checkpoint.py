"""Makes models in bfloat16 that every engine can read: a GGUF file and a Hugging Face directory with the same weights.

The default model exists only as a 4-bit GGUF file. Its weights are dequantized and rounded to bfloat16. `--shape` makes
random weights of a published shape instead, with the default model's tokenizer. Both are made once and kept in octavo's
cache directory.
"""

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import fetch_default_model
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize
from safetensors.torch import save_file

from octavo.frontend.model_files.gguf.cache import convert_gguf
from octavo.protocol.env import Env
from octavo.worker_proc.weights.gguf import read_gguf
from octavo.worker_proc.weights.gguf_blocks import GgufMatrix

DEFAULT_NAME = "SmolLM2-135M-Instruct-bf16"

# Fields that GGUFWriter itself writes, or that are no longer true of the copy.
_NOT_COPIED = {"general.architecture", "general.file_type", "general.quantization_version"}

# `tokenizer.ggml.token_type` of an id that no text is tokenized to.
_UNUSED_TOKEN = 5


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen2 model, optionally with Qwen3-MoE experts or Gemma 3 windows; tied embeddings."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_positions: int = 32_768
    rope_theta: float = 1e6
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    """Columns of an expert's activation."""
    head_size: int | None = None
    """Size of a head, including key and value heads; `None` for `hidden_size` divided by the number of heads."""
    window: int = 0
    """Window of five layers in six, in tokens; 0 if there is none."""

    @property
    def architecture(self) -> str:
        """Architecture name in a GGUF file."""
        return "gemma3" if self.window else "qwen3moe" if self.num_experts else "qwen2"

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden_size // self.num_heads


SHAPES = {
    "qwen2.5-0.5b": Shape(24, 896, 4864, 14, 2, 151_936),
    "qwen3-moe": Shape(16, 1024, 3072, 16, 4, 49_152, num_experts=64, experts_per_token=8, expert_size=512),
    "gemma3-1b": Shape(26, 1152, 6912, 4, 1, 262_144, head_size=256, window=512),
}
"""Shapes by name. The first and the last are from published config.json files. "qwen3-moe" has 0.3 billion active
parameters of 1.7."""


@dataclass(frozen=True)
class Model:
    """The same weights in both formats."""

    gguf: Path
    directory: Path


def main() -> None:
    """Make the requested model unless it exists; print both paths."""
    parser = argparse.ArgumentParser(prog="scripts/make_bf16_checkpoint.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape, not the default model")
    model = make(parser.parse_args().shape)
    print(model.gguf)
    print(model.directory)


def make(shape: str | None = None) -> Model:
    """Return the default model in bfloat16, or random weights of a shape named in `SHAPES`, from the cache if cached.

    Blocks for some seconds if it has to be made; several processes may make it at once.
    """
    source = fetch_default_model.fetch()
    name = f"{shape}-random-bf16" if shape else DEFAULT_NAME
    folder = Env.read().cache_dir / "models"
    model = Model(folder / f"{name}.gguf", folder / name)
    if shape is None:
        _publish(model.gguf, lambda draft: copy_as_bf16(source, draft))
    else:
        _publish(model.gguf, lambda draft: write_random(SHAPES[shape], source, draft))
    _publish(model.directory, lambda draft: write_checkpoint(model.gguf, draft))
    return model


def _publish(target: Path, write: Callable[[Path], None]) -> None:
    """Write the file or directory under a temporary name and rename it, so that it is complete or does not exist."""
    if target.exists():
        return
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write(scratch / target.name)
        if not target.exists():  # unless another process was faster
            os.rename(scratch / target.name, target)
    finally:
        shutil.rmtree(scratch)


def copy_as_bf16(source: Path, target: Path) -> None:
    """Copy a GGUF file, all rounded to bfloat16's values; matrices are stored in bfloat16, vectors in float32."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    _copy_metadata(reader, writer, lambda name: name not in _NOT_COPIED)
    weights = (
        (tensor.name, torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type))))
        for tensor in reader.tensors
    )
    _write_weights(writer, weights)


def write_random(shape: Shape, donor: Path, target: Path, seed: int = 0) -> None:
    """Write a model of a shape: normal weights of deviation 0.02, norms of 1, biases of 0.

    Args:
        shape: the sizes of the model.
        donor: a GGUF file with the tokenizer, padded to the shape's vocabulary with tokens that no text makes.
        target: the file to write.
        seed: the seed of the weights.
    """
    reader = GGUFReader(donor)
    writer = GGUFWriter(target, shape.architecture)
    if shape.window:
        writer.add_sliding_window(shape.window)
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
    if shape.num_experts:
        writer.add_expert_count(shape.num_experts)
        writer.add_expert_used_count(shape.experts_per_token)
        writer.add_expert_feed_forward_length(shape.expert_size)
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.max_positions)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(1e-6)
    lists = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type")
    _copy_metadata(reader, writer, lambda name: name.startswith("tokenizer.") and name not in lists)
    tokens, types = (reader.fields[name].contents() for name in lists)
    num_missing = shape.vocab_size - len(tokens)
    writer.add_token_list([*tokens, *(f"<unused {number}>" for number in range(num_missing))])
    writer.add_token_types([*types, *[_UNUSED_TOKEN] * num_missing])
    _write_weights(writer, _random_weights(shape, seed))


def write_checkpoint(source: Path, directory: Path) -> None:
    """Write a GGUF file's weights, configuration and tokenizer as a directory in Hugging Face layout.

    Raises:
        ConfigError: octavo does not know the architecture.
    """
    directory.mkdir()
    for path in convert_gguf(source, Env.read()).iterdir():
        shutil.copy(path, directory)
    weights = {}
    for name, values, _ in read_gguf(source):
        dense = values.dequantized() if isinstance(values, GgufMatrix) else values
        weights[name] = dense.to(torch.bfloat16).contiguous()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _copy_metadata(reader: GGUFReader, writer: GGUFWriter, wanted: Callable[[str], bool]) -> None:
    for name, field in reader.fields.items():
        if wanted(name) and not name.startswith("GGUF."):  # fields of the file's header
            is_array = field.types[0] is GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if is_array else None)


def _write_weights(writer: GGUFWriter, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    for name, values in weights:
        rounded = values.to(torch.bfloat16)
        if rounded.ndim == 1:  # ggml adds and multiplies vectors in float32
            writer.add_tensor(name, rounded.float().numpy())
        else:
            # numpy has no bfloat16; the writer takes the bytes and derives the shape from them
            raw = rounded.view(torch.uint8).numpy()
            writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _random_weights(shape: Shape, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    hidden, ffn, head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    q_size, kv_size = shape.num_heads * head_dim, shape.num_kv_heads * head_dim

    def matrix(*sizes: int) -> torch.Tensor:
        return 0.02 * torch.randn(sizes, generator=generator)

    yield "token_embd.weight", matrix(shape.vocab_size, hidden)
    yield "output_norm.weight", torch.ones(hidden)
    for layer in range(shape.num_layers):
        block = f"blk.{layer}"
        yield f"{block}.attn_norm.weight", torch.ones(hidden)
        for name, num_outputs in (("attn_q", q_size), ("attn_k", kv_size), ("attn_v", kv_size)):
            yield f"{block}.{name}.weight", matrix(num_outputs, hidden)
            if shape.architecture == "qwen2":
                yield f"{block}.{name}.bias", torch.zeros(num_outputs)
        yield f"{block}.attn_output.weight", matrix(hidden, q_size)
        yield f"{block}.ffn_norm.weight", torch.ones(hidden)
        if shape.architecture != "qwen2":
            yield f"{block}.attn_q_norm.weight", torch.ones(head_dim)
            yield f"{block}.attn_k_norm.weight", torch.ones(head_dim)
        if shape.architecture == "gemma3":
            yield f"{block}.post_attention_norm.weight", torch.ones(hidden)
            yield f"{block}.post_ffw_norm.weight", torch.ones(hidden)
        if shape.num_experts:
            yield f"{block}.ffn_gate_inp.weight", matrix(shape.num_experts, hidden)
            yield f"{block}.ffn_gate_exps.weight", matrix(shape.num_experts, shape.expert_size, hidden)
            yield f"{block}.ffn_up_exps.weight", matrix(shape.num_experts, shape.expert_size, hidden)
            yield f"{block}.ffn_down_exps.weight", matrix(shape.num_experts, hidden, shape.expert_size)
        else:
            yield f"{block}.ffn_gate.weight", matrix(ffn, hidden)
            yield f"{block}.ffn_up.weight", matrix(ffn, hidden)
            yield f"{block}.ffn_down.weight", matrix(hidden, ffn)


if __name__ == "__main__":
    main()
