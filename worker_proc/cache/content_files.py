"""`ContentFiles`: writes and reads the pack files of one rank's KV blocks. A damaged file counts as missing."""

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

import xxhash

from octavo.protocol.block_packs import MAX_CONTENTS, DamagedPack, PackHeader, encode_header, pack_name, pack_path
from octavo.protocol.log import LimitedLog
from octavo.worker_proc.cache.pack_index import PackIndex, PackPlace

logger = logging.getLogger(__name__)

Content: TypeAlias = tuple[bytes, memoryview]
"""Key, and a buffer with the bytes of a block or with room for them."""

_Wanted: TypeAlias = tuple[int, PackPlace, memoryview]
"""Index of a content among those of a call, its place in the files, and room for it."""


class ContentFiles:
    """The packs of one rank in a folder; see `octavo.protocol.block_packs`.

    A pack is written under a temporary name and renamed, so it is complete or absent unless the machine fails; its
    checksums detect that. Writing a pack, or reading any of its contents, counts as use.

    Reads and writes may run on one thread each.

    Args:
        rank: rank of the worker.
    """

    def __init__(self, rank: int) -> None:
        self._rank = str(rank)
        self._log = LimitedLog(logger)
        self._indexes: dict[str, PackIndex] = {}

    def close(self) -> None:
        """Do nothing: no file is open."""

    def write_all(self, folder: str, contents: Sequence[Content]) -> list[bool]:
        """Write contents of one size, in as few packs as possible. Return for each whether it is stored now."""
        is_there: list[bool] = []
        for start in range(0, len(contents), MAX_CONTENTS):
            part = contents[start : start + MAX_CONTENTS]
            is_there += [self._write_pack(folder, part)] * len(part)
        return is_there

    def read_all(self, folder: str, contents: Sequence[Content]) -> list[bool]:
        """Read contents. Return for each whether it was found and intact."""
        index = self._index(folder)
        if any(index.find(key) is None for key, _ in contents):
            index.refresh()
        wanted: list[_Wanted] = []
        for number, (key, content) in enumerate(contents):
            if (place := index.find(key)) is not None:
                wanted.append((number, place, content))
        wanted.sort(key=lambda one: (one[1].path, one[1].number))
        is_there = [False] * len(contents)
        for path, part in groupby(wanted, lambda one: one[1].path):
            for number in self._read_pack(index, path, list(part)):
                is_there[number] = True
        return is_there

    def _write_pack(self, folder: str, contents: Sequence[Content]) -> bool:
        keys = tuple(key for key, _ in contents)
        header = PackHeader(keys, (0,) * len(keys), len(contents[0][1]))
        path = pack_path(Path(folder, self._rank), pack_name(keys))
        unfinished = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}")
        checksums = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb", buffering=0) as file:
                for index, (_, content) in enumerate(contents):
                    # perf: one by one, so that a content is still in the processor's cache when it is written
                    checksums.append(xxhash.xxh3_64_intdigest(content))
                    _write_at(file.fileno(), content, header.offset(index))
                header = header._replace(checksums=tuple(checksums))
                _write_at(file.fileno(), encode_header(header), 0)
            unfinished.rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            self._log.warning("cannot keep %d KV blocks in %s: %s", len(contents), path, error)
            return False
        self._index(folder).add(path, header)
        return True

    def _read_pack(self, index: PackIndex, path: Path, wanted: Sequence[_Wanted]) -> list[int]:
        """Read contents of one pack, sorted by place. Return the indices of those that were intact."""
        whole: list[int] = []
        try:
            with path.open("rb", buffering=0) as file:
                for number, (_, header, place), content in wanted:
                    num_read = os.preadv(file.fileno(), [content], header.offset(place))
                    if num_read != len(content) or len(content) != header.content_bytes:
                        raise DamagedPack("it has another size")
                    if xxhash.xxh3_64_intdigest(content) != header.checksums[place]:
                        raise DamagedPack(f"the checksum of content {place} is wrong")
                    whole.append(number)
            os.utime(path)
        except FileNotFoundError:
            index.drop(path.name)
        except DamagedPack as error:
            index.delete(path, error)
        except OSError as error:
            self._log.warning("cannot read KV blocks in %s: %s", path, error)
        return whole

    def _index(self, folder: str) -> PackIndex:
        return self._indexes.setdefault(folder, PackIndex(Path(folder, self._rank)))


def _write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    if (num_written := os.pwrite(fd, data, offset)) != len(data):
        raise OSError(f"only {num_written} of {len(data)} bytes were written: is the disk full?")
