"""Reads GGUF files: dequantizes each tensor and gives it the name and shape of the original checkpoint."""

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize
from torch import Tensor

from octavo.protocol.errors import ConfigError
from octavo.worker_proc.weights.gguf_header import GgufHeader, TensorInfo, parse_header
from octavo.worker_proc.weights.gguf_names import HfPlace, hf_place

_PLAIN_TYPES = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
_QUANTIZED_TYPES = frozenset({Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q4_K, Type.Q5_K, Type.Q6_K})

_VALUES_PER_ROW = 2**14
"""A power of two, and a multiple of every type's block."""


def read_gguf(path: Path) -> Iterator[tuple[str, Tensor, int]]:
    """Yield every weight as (Hugging Face name, tensor, its bytes in the file).

    Raises:
        ConfigError: the file is missing or cut short, its architecture has no name table here, or a
            tensor is of a type that is not supported (the message names both).
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    header = parse_header(data, path)
    _check_types(header, path)
    architecture = str(header.metadata.get("general.architecture", ""))
    num_heads = int(header.metadata.get(f"{architecture}.attention.head_count", 0))
    num_kv_heads = int(header.metadata.get(f"{architecture}.attention.head_count_kv", num_heads))
    for info in header.tensors:
        place = hf_place(architecture, info.name)
        if place is not None:
            tensor = _tensor(data, info)
            yield place.name, _as_original(tensor, place, num_heads, num_kv_heads), info.num_bytes


def dequantized(data: npt.NDArray[np.uint8], kind: Type) -> Tensor:
    """Return the float32 values of quantized blocks, both in one dimension."""
    values_per_block, block_bytes = GGML_QUANT_SIZES[kind]
    num_blocks = data.size // block_bytes
    # The gguf package takes 16 rows at a time, and a weight's rows are so short that most of its time
    # goes between two calls of numpy. Blocks do not care where a row ends, so longer rows are made of
    # them: 0.36 s instead of 0.63 s for a model of 135 million weights.
    blocks_per_row = min(num_blocks & -num_blocks, _VALUES_PER_ROW // values_per_block)
    return torch.from_numpy(dequantize(data.reshape(-1, blocks_per_row * block_bytes), kind)).view(-1)


def _check_types(header: GgufHeader, path: Path) -> None:
    for info in header.tensors:
        if info.type not in _PLAIN_TYPES and info.type not in _QUANTIZED_TYPES:
            supported = sorted(kind.name for kind in {*_PLAIN_TYPES, *_QUANTIZED_TYPES})
            raise ConfigError(
                f"tensor {info.name} in {path.name} is of type {info.type.name}, which is not supported",
                hint=f"use a file with {', '.join(supported)} only",
            )


def _tensor(data: mmap.mmap, info: TensorInfo) -> Tensor:
    if dtype := _PLAIN_TYPES.get(info.type):
        count = info.num_bytes // dtype.itemsize
        return torch.frombuffer(data, dtype=dtype, count=count, offset=info.offset).view(info.shape)
    blocks = np.frombuffer(data, dtype=np.uint8, count=info.num_bytes, offset=info.offset)
    return dequantized(blocks, info.type).view(info.shape)


def _as_original(tensor: Tensor, place: HfPlace, num_heads: int, num_kv_heads: int) -> Tensor:
    if place.rope_heads:
        return undo_rope_order(tensor, num_heads if place.rope_heads == "query" else num_kv_heads)
    return tensor.T if place.is_transposed else tensor


def undo_rope_order(tensor: Tensor, num_heads: int) -> Tensor:
    """Put the rows of a query or key projection back into Hugging Face's order.

    Rotary embedding pairs dimension i with i + half in Hugging Face's models and 2i with 2i + 1 in
    ggml's, so the converter of the llama architecture interleaves the two halves of every head's rows.
    """
    halves = tensor.view(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)
