"""Parses the header of a GGUF file: its metadata and the location of each tensor.

The `gguf` package's reader makes an array of every token of the vocabulary (1.8 s for 49 152 tokens);
loading needs none of them, so this parser skips arrays. The format is described in docs/gguf.md of
the ggml project.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from octavo.protocol.errors import ConfigError

Scalar = int | float | bool | str

_MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALAR_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SCALARS = {number: struct.Struct("<" + code) for number, code in _SCALAR_CODES.items()}
_U32, _U64 = _SCALARS[4], _SCALARS[10]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    """Slowest dimension first, as in torch."""
    type: GGMLQuantizationType
    offset: int
    """Offset from the start of the file, in bytes."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything but the tensors' data and the metadata's arrays."""

    metadata: dict[str, Scalar]
    tensors: list[TensorInfo]


def parse_header(data: mmap.mmap | bytes, path: Path) -> GgufHeader:
    """Return the header of a file whose complete content is `data`.

    Raises:
        ConfigError: not a GGUF file, cut short, or a tensor of an unknown type.
    """
    if data[:4] != _MAGIC:
        raise ConfigError(f"{path} is not a GGUF file: it starts with {bytes(data[:4])!r}")
    try:
        header = _Cursor(data).header(path)
    except (struct.error, OverflowError) as error:  # the latter for a length that no file can have
        raise ConfigError(f"{path} ends inside its header, after {len(data)} bytes") from error
    for tensor in header.tensors:
        if tensor.offset + tensor.num_bytes > len(data):
            raise ConfigError(
                f"{path} is cut short: tensor {tensor.name} ends at byte {tensor.offset + tensor.num_bytes}, "
                f"the file at {len(data)}",
                hint="download the file again",
            )
    return header


class _Cursor:
    """Reads values one after another."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self._position = len(_MAGIC)

    def header(self, path: Path) -> GgufHeader:
        version = self._scalar(_U32)
        if version not in (2, 3):
            raise ConfigError(f"{path} is of GGUF version {version}; versions 2 and 3 are read")
        num_tensors, num_keys = self._scalar(_U64), self._scalar(_U64)
        metadata: dict[str, Scalar] = {}
        for _ in range(num_keys):
            key = self._string()
            value = self._value(self._scalar(_U32))
            if value is not None:
                metadata[key] = value
        found = [self._tensor(path) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ConfigError(f"{path} is damaged: its general.alignment is {alignment!r}")
        start = -(-self._position // alignment) * alignment
        tensors = [TensorInfo(info.name, info.shape, info.type, start + info.offset, info.num_bytes) for info in found]
        return GgufHeader(metadata, tensors)

    def _scalar(self, kind: struct.Struct) -> int:
        value: int
        (value,) = kind.unpack_from(self._data, self._position)
        self._position += kind.size
        return value

    def _string(self) -> str:
        size = self._scalar(_U64)
        text = bytes(self._data[self._position : self._position + size])
        if len(text) < size:
            raise struct.error("the string ends after the file")
        self._position += size
        return text.decode(errors="replace")

    def _value(self, type_number: int) -> Scalar | None:
        """Return a value; `None` for an array, which is skipped."""
        if type_number == _STRING:
            return self._string()
        if type_number != _ARRAY:
            return self._scalar(_scalar_kind(type_number))
        item_type, count = self._scalar(_U32), self._scalar(_U64)
        if item_type == _STRING:
            for _ in range(count):
                size = self._scalar(_U64)
                self._position += size
        elif item_type == _ARRAY:
            for _ in range(count):
                self._value(_ARRAY)
        else:
            self._position += count * _scalar_kind(item_type).size
        return None

    def _tensor(self, path: Path) -> TensorInfo:
        name = self._string()
        num_dims = self._scalar(_U32)
        shape = tuple(self._scalar(_U64) for _ in range(num_dims))[::-1]
        type_number, offset = self._scalar(_U32), self._scalar(_U64)
        try:
            kind = GGMLQuantizationType(type_number)
        except ValueError as error:
            raise ConfigError(f"tensor {name} in {path} is of the unknown GGUF type {type_number}") from error
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        num_bytes = block_bytes
        for length in shape:
            num_bytes *= length
        return TensorInfo(name, shape, kind, offset, num_bytes // block_size)


def _scalar_kind(type_number: int) -> struct.Struct:
    if type_number not in _SCALARS:
        raise struct.error(f"unknown metadata type {type_number}")
    return _SCALARS[type_number]
