"""`ContentFiles`: writes and reads the files of KV blocks of one rank. A damaged file is a missing one."""

import contextlib
import logging
import os
import struct
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from octavo.protocol.log import LimitedLog

logger = logging.getLogger(__name__)

_MAGIC = b"octavoKV"
_HEADER = struct.Struct("<8sQI44s")
"""Magic bytes, size of the content, checksum of key and content, key padded with zeros."""


Content: TypeAlias = tuple[bytes, memoryview]
"""Key, and the bytes of a block or room for them."""


class ContentFiles:
    """The files of one rank below a folder: `folder/rank/xx/key`, each a header and the bytes of a block.

    A file is written under another name and renamed, so it is there as a whole or not at all, unless the machine
    fails: then its checksum tells. Reading and writing take a file as used.

    Args:
        rank: of the worker.
    """

    def __init__(self, rank: int) -> None:
        self._rank = str(rank)
        self._log = LimitedLog(logger)
        self._made: set[Path] = set()

    def write_all(self, folder: str, contents: Sequence[Content]) -> list[bool]:
        """Write contents; returns which of them are there now."""
        return [self.write(folder, key, content) for key, content in contents]

    def read_all(self, folder: str, contents: Sequence[Content]) -> list[bool]:
        """Read contents; returns which of them were there and whole."""
        return [self.read(folder, key, content) for key, content in contents]

    def close(self) -> None:
        """Do nothing: no file is open."""

    def write(self, folder: str, key: bytes, content: memoryview) -> bool:
        """Write a content, unless it is there; returns whether it is there now."""
        path = self._path(folder, key)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}")
        try:
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)
                return True
            if path.parent not in self._made:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._made.add(path.parent)
            with unfinished.open("wb", buffering=0) as file:
                header = _HEADER.pack(_MAGIC, len(content), _checksum(key, content), key)
                is_whole = os.writev(file.fileno(), [header, content]) == len(header) + len(content)
            if not is_whole:
                raise OSError(f"{unfinished} was written in part only")
            unfinished.rename(path)
        except OSError as error:
            self._made.discard(path.parent)
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            self._log.warning("cannot keep a KV block in %s: %s", path, error)
            return False
        return True

    def read(self, folder: str, key: bytes, content: memoryview) -> bool:
        """Read a content; returns whether it was there and whole. A damaged file is deleted."""
        path = self._path(folder, key)
        header = bytearray(_HEADER.size)
        try:
            with path.open("rb", buffering=0) as file:
                num_read = os.readv(file.fileno(), [header, content])
                has_more = bool(file.read(1))
            magic, num_bytes, checksum, padded_key = _HEADER.unpack(header)
            is_whole = num_read == len(header) + len(content) and not has_more and num_bytes == len(content)
            if not is_whole or magic != _MAGIC or padded_key.rstrip(b"\0") != key.rstrip(b"\0"):
                raise _Damaged("it has another size or begins with something else")
            if checksum != _checksum(key, content):
                raise _Damaged("its checksum is wrong")
            os.utime(path)
        except FileNotFoundError:
            return False
        except _Damaged as error:
            self._log.warning("deleted %s, a damaged file of a KV block: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return False
        except OSError as error:
            self._log.warning("cannot read the KV block in %s: %s", path, error)
            return False
        return True

    def _path(self, folder: str, key: bytes) -> Path:
        name = key.hex()
        return Path(folder, self._rank, name[:2], name)


class _Damaged(Exception):
    """A file does not hold what its name says."""


def _checksum(key: bytes, content: memoryview) -> int:
    return zlib.crc32(content, zlib.crc32(key))
