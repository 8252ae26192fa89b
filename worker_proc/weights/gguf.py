"""Reads GGUF files: gives each tensor the name, shape and order of rows of the original checkpoint.

Quantized matrices are returned as they are in the file (`GgufMatrix`); the caller decides whether to convert them.
"""

import mmap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from gguf.constants import GGMLQuantizationType as Type
from torch import Tensor

from octavo.protocol.errors import ConfigError
from octavo.worker_proc.weights.gguf_blocks import SUPPORTED_TYPES, GgufMatrix, dequantized
from octavo.worker_proc.weights.gguf_header import GgufHeader, TensorInfo, parse_header
from octavo.worker_proc.weights.gguf_names import HfPlace, hf_place

_PLAIN_TYPES = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}


def read_gguf(
    path: Path, wants: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor | GgufMatrix, int]]:
    """Yield every weight that is wanted as (Hugging Face name, tensor, its bytes in the file).

    Tensors are views of the mapped file where that is possible.

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
        if place is not None and place.is_stacked:
            yield from _experts(data, info, place, wants)
        elif place is not None and wants(place.name):
            heads = num_heads if place.rope_heads == "query" else num_kv_heads
            yield place.name, _tensor(data, info, place, heads), info.num_bytes


def _experts(
    data: mmap.mmap, info: TensorInfo, place: HfPlace, wants: Callable[[str], bool]
) -> Iterator[tuple[str, Tensor | GgufMatrix, int]]:
    """Yield the wanted experts of a tensor that holds all of a layer."""
    num_experts, *shape = info.shape
    num_bytes = info.num_bytes // num_experts
    for expert in range(num_experts):
        name = place.name.format(expert)
        if wants(name):
            part = replace(info, shape=tuple(shape), offset=info.offset + expert * num_bytes, num_bytes=num_bytes)
            yield name, _tensor(data, part, place, 0), num_bytes


def _check_types(header: GgufHeader, path: Path) -> None:
    for info in header.tensors:
        if info.type not in _PLAIN_TYPES and info.type not in SUPPORTED_TYPES:
            supported = sorted(kind.name for kind in {*_PLAIN_TYPES, *SUPPORTED_TYPES})
            raise ConfigError(
                f"tensor {info.name} in {path.name} is of type {info.type.name}, which is not supported",
                hint=f"use a file with {', '.join(supported)} only",
            )


def _tensor(data: mmap.mmap, info: TensorInfo, place: HfPlace, num_heads: int) -> Tensor | GgufMatrix:
    """Return a tensor in its original order; `num_heads` matters only for projections that rotary embedding rotates."""
    data_type = _PLAIN_TYPES.get(info.type)
    blocks = torch.frombuffer(data, dtype=torch.uint8, count=info.num_bytes, offset=info.offset)
    if data_type is None and len(info.shape) == 2:
        rows_OB = blocks.view(info.shape[0], -1)
        if place.rope_heads:
            rows_OB = undo_rope_order(rows_OB, num_heads)
        return GgufMatrix(info.name, info.type, rows_OB.numpy())
    values = dequantized(blocks.numpy(), info.type) if data_type is None else blocks.view(data_type)
    tensor = values.view(info.shape)
    if place.rope_heads:
        return undo_rope_order(tensor, num_heads)
    if place.is_row:
        return tensor.view(1, -1)
    return tensor.T if place.is_transposed else tensor


def undo_rope_order(tensor: Tensor, num_heads: int) -> Tensor:
    """Restore the Hugging Face order of the rows of a query or key projection, whatever their element type.

    Rotary embedding pairs dimension i with i + half in Hugging Face's models and 2i with 2i + 1 in
    ggml's, so the converter of the llama architecture interleaves the two halves of every head's rows.
    """
    halves = tensor.view(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)
