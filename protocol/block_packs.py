"""The layout of pack files, each with several KV blocks. Workers write and read packs; the core lists them.

    header: magic, checksum of the rest of the header, number of contents, bytes of each
            for each content: its key, and its checksum
    padding to a multiple of 4096
    contents, one after another

A pack is named by a digest of its keys, so what it contains is known by its name, and two engines that write the same
contents write the same file. Each rank has packs of its own: `folder/rank/xx/name`, where `xx` begins the name.
"""

import hashlib
import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

MAX_CONTENTS = 32
"""Most blocks in one pack. Creating and listing a file costs as much as writing 100 KB, so packs hold several blocks.
They do not hold many, because the oldest packs are deleted as a whole."""

ALIGNMENT = 4096
"""Blocks start at a page of the page cache, from which they are copied faster."""

PACK_NAME = re.compile(r"[0-9a-f]{32}")
UNFINISHED_NAME = re.compile(r"\.[0-9a-f]{32}\..+")
"""Name of a pack that is being written."""

_MAGIC = b"octavoKV"
_HEAD = struct.Struct("<8sIIQ")
_CHECKED = slice(12, None)
"""The part of the header that its checksum covers."""
_ENTRY = struct.Struct("<48pQ")


class DamagedPack(ValueError):
    """A file is not what a worker has written under its name."""


class PackHeader(NamedTuple):
    """The contents of a pack."""

    keys: tuple[bytes, ...]
    checksums: tuple[int, ...]
    """Checksums of the blocks, 64 bits each. Workers decide how they are computed."""
    content_bytes: int
    """Bytes of each block."""

    def offset(self, index: int) -> int:
        """Return the file offset of a block."""
        return _offset_of_contents(len(self.keys)) + index * self.content_bytes


def pack_name(keys: Sequence[bytes]) -> str:
    """Return the name of a pack with these keys."""
    return hashlib.blake2b(b"".join(keys), digest_size=16).hexdigest()


def pack_path(folder: Path, name: str) -> Path:
    """Return the path of a pack below the folder of its rank."""
    return folder / name[:2] / name


def encode_header(header: PackHeader) -> bytes:
    """Return the bytes before the first block."""
    if not 0 < len(header.keys) <= MAX_CONTENTS:
        raise ValueError(f"a pack has 1 to {MAX_CONTENTS} contents, not {len(header.keys)}")
    data = bytearray(_offset_of_contents(len(header.keys)))
    _HEAD.pack_into(data, 0, _MAGIC, 0, len(header.keys), header.content_bytes)
    for index, (key, checksum) in enumerate(zip(header.keys, header.checksums, strict=True)):
        _ENTRY.pack_into(data, _HEAD.size + index * _ENTRY.size, key, checksum)
    _HEAD.pack_into(data, 0, _MAGIC, zlib.crc32(data[_CHECKED]), len(header.keys), header.content_bytes)
    return bytes(data)


def read_header(fd: int, name: str) -> PackHeader:
    """Read the header of an open pack.

    Raises:
        DamagedPack: the file is torn, damaged, or does not match its name.
        OSError: the file cannot be read.
    """
    data = os.pread(fd, _offset_of_contents(MAX_CONTENTS), 0)
    if len(data) < _HEAD.size:
        raise DamagedPack("it is shorter than a header")
    magic, checksum, num_contents, content_bytes = _HEAD.unpack_from(data)
    if magic != _MAGIC or not 0 < num_contents <= MAX_CONTENTS:
        raise DamagedPack("it does not begin like a pack of KV blocks")
    start = _offset_of_contents(num_contents)
    if os.fstat(fd).st_size != start + num_contents * content_bytes:
        raise DamagedPack("it has another size than its header says")
    if zlib.crc32(data[:start][_CHECKED]) != checksum:
        raise DamagedPack("the checksum of its header is wrong")
    entries = [_ENTRY.unpack_from(data, _HEAD.size + index * _ENTRY.size) for index in range(num_contents)]
    header = PackHeader(tuple(key for key, _ in entries), tuple(each for _, each in entries), content_bytes)
    if pack_name(header.keys) != name:
        raise DamagedPack("it has the name of another pack")
    return header


def read_header_of(path: Path) -> PackHeader:
    """Open a pack and return its header. Raises the errors of `read_header`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_header(fd, path.name)
    finally:
        os.close(fd)


def list_packs(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each pack of a rank, in any order. Yields nothing if the folder does not exist."""
    try:
        groups = [entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return
    for group in groups:
        try:
            names = os.listdir(group)
        except FileNotFoundError:
            continue
        yield from [(name, Path(group, name)) for name in names if PACK_NAME.fullmatch(name)]


def _offset_of_contents(num_contents: int) -> int:
    return -(-(_HEAD.size + num_contents * _ENTRY.size) // ALIGNMENT) * ALIGNMENT
