"""Reads GGUF files: restores each tensor's name, shape and row order of the original checkpoint.

Quantized matrices are returned in their stored form (`GgufMatrix`); the caller decides whether to convert them.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from gguf.constants import GGMLQuantizationType as Type
from torch import Tensor

from octavo.protocol.errors import ConfigError
from octavo.protocol.weight_files import gguf_parts
from octavo.worker_proc.weights.gguf_blocks import SUPPORTED_TYPES, GgufMatrix, dequantized
from octavo.worker_proc.weights.gguf_header import GgufHeader, TensorInfo, parse_header
from octavo.worker_proc.weights.gguf_names import Change, HfPlace, HfPlaces
from octavo.worker_proc.weights.rope_order import undo_rope_order

_PLAIN_TYPES = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}


Weights = Iterator[tuple[str, Tensor | GgufMatrix, int]]
"""Hugging Face name, values, and number of bytes in the file, of each weight."""


def read_gguf(path: Path, wants: Callable[[str], bool] = lambda name: True) -> Weights:
    """Yield every wanted weight as (Hugging Face name, tensor, its bytes in the file).

    Tensors are views of the mapped files where that is possible.

    Args:
        path: path of the file, or of one of the parts of a model.
        wants: whether a weight is needed.

    Raises:
        ConfigError: a file is missing or cut short, its architecture has no name table here, or a
            tensor is of a type that is not supported (the message names both).
    """
    parts = []
    for part in gguf_parts(path):
        try:
            with part.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {part}: {error}") from error
        header = parse_header(data, part)
        _check_types(header, part)
        parts.append((data, header))
    yield from _Files(parts, wants).weights()


class _Files:
    """The weights of mapped files with parsed headers. The first file describes the model."""

    def __init__(self, parts: Sequence[tuple[mmap.mmap, GgufHeader]], wants: Callable[[str], bool]) -> None:
        self._parts = parts
        self._data, first = parts[0]
        self._metadata = first.metadata
        self._wants = wants
        self._architecture = str(first.metadata.get("general.architecture", ""))
        num_extra = self._number("nextn_predict_layers", 0)
        num_layers = self._number("block_count", 0) - num_extra if num_extra else None
        names = {info.name for _, header in parts for info in header.tensors}
        self._places = HfPlaces(self._architecture, names, num_layers)
        self._num_heads = self._number("attention.head_count", 0)
        self._num_kv_heads = self._number("attention.head_count_kv", self._num_heads)
        self._latent_keys: dict[str, Tensor] = {}
        self._latent_values: dict[str, Tensor] = {}

    def weights(self) -> Weights:
        """Yield the wanted weights, in the order of the files."""
        for data, header in self._parts:
            self._data = data
            for info in header.tensors:
                yield from self._weights_of(info)

    def _weights_of(self, info: TensorInfo) -> Weights:
        place = self._places.of(info.name)
        if place is None:
            return
        match place.change:
            case Change.STACKED:
                num_experts, names = info.shape[0], place.name.replace("{}", "{0}")
                rows = {names.format(expert): range(expert, expert + 1) for expert in range(num_experts)}
                yield from self._parts_of(info, rows, info.shape[1:])
            case Change.QKV:
                yield from self._parts_of(info, self._qkv_rows(info, place.name))
            case Change.KEY_PART | Change.VALUE_PART if self._wants(place.name):
                yield from self._joined(info, place)
            case _ if self._wants(place.name):
                yield place.name, self._tensor(info, place.change), info.num_bytes

    def _number(self, key: str, default: int) -> int:
        return int(self._metadata.get(f"{self._architecture}.{key}", default))

    def _parts_of(self, info: TensorInfo, parts: Mapping[str, range], shape: tuple[int, ...] | None = None) -> Weights:
        """Yield parts of a tensor: the rows of each, by name; `shape`: of a part, `None` means rows of the tensor."""
        row_bytes = info.num_bytes // info.shape[0]
        for name, rows in parts.items():
            if self._wants(name):
                offset, num_bytes = info.offset + rows.start * row_bytes, len(rows) * row_bytes
                own_shape = (len(rows), *info.shape[1:]) if shape is None else shape
                part = replace(info, shape=own_shape, offset=offset, num_bytes=num_bytes)
                yield name, self._tensor(part, Change.NONE), num_bytes

    def _qkv_rows(self, info: TensorInfo, name: str) -> dict[str, range]:
        head_dim = info.shape[0] // (self._num_heads + 2 * self._num_kv_heads)
        end_of_queries, keys = self._num_heads * head_dim, self._num_kv_heads * head_dim
        return {
            name.format("q"): range(end_of_queries),
            name.format("k"): range(end_of_queries, end_of_queries + keys),
            name.format("v"): range(end_of_queries + keys, end_of_queries + 2 * keys),
        }

    def _joined(self, info: TensorInfo, place: HfPlace) -> Weights:
        """Yield the projection of a short vector to the keys and values of all heads, once both parts are there."""
        part = self._dense(info)
        if place.change is Change.KEY_PART:
            self._latent_keys[place.name] = part.transpose(1, 2)
        else:
            self._latent_values[place.name] = part
        if place.name in self._latent_keys and place.name in self._latent_values:
            heads = self._latent_keys.pop(place.name), self._latent_values.pop(place.name)
            yield place.name, torch.cat(heads, 1).flatten(0, 1), info.num_bytes

    def _dense(self, info: TensorInfo) -> Tensor:
        blocks = torch.frombuffer(self._data, dtype=torch.uint8, count=info.num_bytes, offset=info.offset)
        data_type = _PLAIN_TYPES.get(info.type)
        values = dequantized(blocks.numpy(), info.type) if data_type is None else blocks.view(data_type)
        return values.view(info.shape)

    def _tensor(self, info: TensorInfo, change: Change) -> Tensor | GgufMatrix:
        """Return a tensor in its original order."""
        if info.type not in _PLAIN_TYPES and len(info.shape) == 2:
            blocks = torch.frombuffer(self._data, dtype=torch.uint8, count=info.num_bytes, offset=info.offset)
            rows_OB = blocks.view(info.shape[0], -1)
            return GgufMatrix(info.name, info.type, self._in_order(rows_OB, change).numpy())
        tensor = self._dense(info)
        match change:
            case Change.ROW:
                return tensor.view(1, -1)
            case Change.TRANSPOSED:
                return tensor.T
            case Change.UNSQUEEZED:
                return tensor.unsqueeze(1)
            case Change.FLATTENED:
                return tensor.flatten()
            case Change.NEGATIVE_EXP:
                return torch.log(-tensor.float()).flatten()
            case Change.ONE_ADDED:
                return tensor.float() - 1.0
        return self._in_order(tensor, change)

    def _in_order(self, rows: Tensor, change: Change) -> Tensor:
        if change is not Change.ROTARY_ROWS:
            return rows
        width = self._number("embedding_length", 0) // max(1, self._num_heads)
        head_dim = self._number("attention.key_length", width)
        if head_dim < 1 or rows.shape[0] % head_dim:
            raise ConfigError(f"the GGUF file has no {self._architecture}.attention.key_length that fits its tensors")
        return undo_rope_order(rows, rows.shape[0] // head_dim)


def _check_types(header: GgufHeader, path: Path) -> None:
    for info in header.tensors:
        if info.type not in _PLAIN_TYPES and info.type not in SUPPORTED_TYPES:
            supported = sorted(kind.name for kind in {*_PLAIN_TYPES, *SUPPORTED_TYPES})
            raise ConfigError(
                f"tensor {info.name} in {path.name} is of type {info.type.name}, which is not supported",
                hint=f"use a file with {', '.join(supported)} only",
            )
