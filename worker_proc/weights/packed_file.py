"""One file with all packed weights of a model, laid out to be memory-mapped.

    8 bytes   MAGIC
    4 bytes   length of the header, little-endian
    4 bytes   CRC-32 of the header
    ...       the header: a `_Header` in msgpack
    ...       the buffers, from the next multiple of 2 MiB on, each at a multiple of ALIGNMENT

Knows bytes and names, not their meaning.
"""

import os
import struct
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
from torch import Tensor

from octavo.kernels.native.memory import HUGE_PAGE_BYTES, map_file

MAGIC = b"octavoPW"
FORMAT_VERSION = 3
"""Incremented when the layout of this module or the content that `packed_weights` writes changes."""
ALIGNMENT = 64
"""The size of a cache line and of the widest vector."""
TEMPORARY_SUFFIX = ".tmp"

_PIECE_BYTES = 4 * HUGE_PAGE_BYTES

_PREFIX = struct.Struct(f"<{len(MAGIC)}sII")
_MAX_HEADER_BYTES = 2**28

Fields = dict[str, int | float | str | list[int]]


class DamagedFile(Exception):
    """The file is incomplete, or `write` did not make it for this key; the message says which."""


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """A named item: its attributes, and its buffers as one-dimensional uint8 tensors."""

    fields: Fields
    buffers: Mapping[str, Tensor]


class _Entry(msgspec.Struct, array_like=True):
    name: str
    fields: Fields
    buffers: dict[str, tuple[int, int]]
    """Offset from the first buffer, and size, of each buffer."""


class _Header(msgspec.Struct, array_like=True):
    version: int
    key: str
    num_bytes: int
    """Bytes from the first buffer to the end of the file."""
    entries: list[_Entry]


def write(path: Path, key: str, items: Mapping[str, Item]) -> int:
    """Write the file atomically and return its size.

    Blocks until the file is on the disk.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    header = _describe(key, items)
    encoded = msgspec.msgpack.encode(header)
    start = _first_buffer(len(encoded))
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=path.name, suffix=TEMPORARY_SUFFIX, buffering=0, delete=False
    ) as file:
        try:
            pieces = _Pieces(file.fileno())
            pieces.write(_PREFIX.pack(MAGIC, len(encoded), zlib.crc32(encoded)) + encoded)
            pieces.write(bytes(start - _PREFIX.size - len(encoded)))
            for item in items.values():
                for buffer in item.buffers.values():
                    pieces.write(buffer.numpy().data)
                    pieces.write(bytes(-buffer.nbytes % ALIGNMENT))
            pieces.flush()
            # Without fsync a power failure could leave a file of the right size without content.
            os.fsync(file.fileno())
            os.rename(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    return start + header.num_bytes


class _Pieces:
    """Writes a file in pieces that are multiples of a huge page.

    ext4 stores each write in folios of up to that size, and a mapping can use huge pages only for complete ones. If
    tensors were written one by one, half of a file of 155 MB would be mapped with small pages.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._piece = bytearray(_PIECE_BYTES)
        self._used = 0

    def write(self, data: bytes | memoryview) -> None:
        """Add bytes to the file.

        Raises:
            OSError: the disk is full.
        """
        rest = memoryview(data)
        while rest:
            taken = rest[: _PIECE_BYTES - self._used]
            self._piece[self._used : self._used + len(taken)] = taken
            self._used += len(taken)
            rest = rest[len(taken) :]
            if self._used == _PIECE_BYTES:
                self.flush()

    def flush(self) -> None:
        """Write the incomplete last piece."""
        rest = memoryview(self._piece)[: self._used]
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self._used = 0


def read(path: Path, key: str) -> dict[str, Item]:
    """Return the items of a file. Their buffers are views of the mapped file, read on first access.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedFile: the file is incomplete, of another version or of another key.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        start, header = _read_header(file)
        if os.fstat(file.fileno()).st_size != start + header.num_bytes:
            raise DamagedFile("it is cut short or has grown")
    if header.key != key:
        raise DamagedFile("it was made for another model or other settings")
    whole = map_file(path, start, header.num_bytes)
    return {
        entry.name: Item(
            entry.fields,
            {name: whole[offset : offset + num_bytes] for name, (offset, num_bytes) in entry.buffers.items()},
        )
        for entry in header.entries
    }


def _describe(key: str, items: Mapping[str, Item]) -> _Header:
    entries, end = [], 0
    for name, item in items.items():
        places = {}
        for buffer_name, buffer in item.buffers.items():
            places[buffer_name] = (end, buffer.nbytes)
            end += _aligned(buffer.nbytes)
        entries.append(_Entry(name, item.fields, places))
    return _Header(FORMAT_VERSION, key, end, entries)


def _read_header(file: BinaryIO) -> tuple[int, _Header]:
    """Return the offset of the first buffer, and the header."""
    start = file.read(_PREFIX.size)
    if len(start) < _PREFIX.size or not start.startswith(MAGIC):
        raise DamagedFile("it is not a file of packed weights")
    _, num_bytes, checksum = _PREFIX.unpack(start)
    encoded = file.read(min(num_bytes, _MAX_HEADER_BYTES))
    if len(encoded) < num_bytes or zlib.crc32(encoded) != checksum:
        raise DamagedFile("its header is damaged")
    try:
        header = msgspec.msgpack.decode(encoded, type=_Header)
    except msgspec.DecodeError as error:
        raise DamagedFile("its header is of another version") from error
    if header.version != FORMAT_VERSION:
        raise DamagedFile(f"it is of version {header.version}, not {FORMAT_VERSION}")
    return _first_buffer(num_bytes), header


def _first_buffer(header_bytes: int) -> int:
    """Return the offset of the first buffer: a multiple of a huge page, so that the kernel can map huge pages."""
    return -(-(_PREFIX.size + header_bytes) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
