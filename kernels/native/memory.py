"""Memory for weights, caches and activations: aligned to huge pages, and files mapped into it.

Everything here is a `uint8` tensor over a mapping that ends with the last tensor over it. Huge pages (2 MiB instead of
4 KiB) spare the processor most of its page-table walks, which cost a reader of long streams a tenth of the memory
bandwidth and more (docs/performance.md). Decides nothing about what lies where inside a buffer.
"""

import contextlib
import mmap
import os
import threading
from pathlib import Path

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
SLAB_BYTES = 32 << 20
ALIGNMENT = 64
"""A cache line, and the widest vector."""


def allocate(num_bytes: int) -> Tensor:
    """Return `num_bytes` zeros that begin at a multiple of 64 bytes, and at a huge page if there are many.

    Memory is taken when it is first written, by whole huge pages where the system has them, so a large buffer of
    which little is used costs little. Buffers of less than half a slab share one, which is given back after the last of
    them: the many small weights of a model would otherwise have no huge pages.

    Raises:
        MemoryError: the system does not promise that much.
    """
    if num_bytes == 0:
        return _EMPTY
    if num_bytes < SLAB_BYTES // 2:
        return _Slab.take(num_bytes)
    mapping, start = _map_zeros(num_bytes)
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=start, count=num_bytes)


def map_file(path: Path, offset: int, num_bytes: int) -> Tensor:
    """Return a part of a file as a tensor, read when it is looked at and shared with other readers of the file.

    Writing to the tensor changes this process's copy of a page, never the file. Newer kernels map files that they hold
    in large pieces (6.18 with ext4 was seen to) by huge pages, and then it is as fast to read as `allocate`'s memory.

    Raises:
        OSError: the file cannot be read.
        ValueError: it ends before the part does.
    """
    with path.open("rb") as file:
        _require_part(file.fileno(), path, offset, num_bytes)
        if not num_bytes:
            return _EMPTY
        before = offset % mmap.ALLOCATIONGRANULARITY
        mapping = mmap.mmap(
            file.fileno(),
            before + num_bytes,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=offset - before,
        )
    _advise(mapping, "MADV_HUGEPAGE", 0, before + num_bytes)
    _advise(mapping, "MADV_WILLNEED", 0, before + num_bytes)
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=before, count=num_bytes)


class _Slab:
    """The mapping that small buffers are taken from, one behind the other, until it is used up."""

    _lock = threading.Lock()
    _mapping: mmap.mmap | None = None
    _start = 0
    _end = 0

    @classmethod
    def take(cls, num_bytes: int) -> Tensor:
        with cls._lock:
            if cls._mapping is None or cls._start + num_bytes > cls._end:
                cls._mapping, cls._start = _map_zeros(SLAB_BYTES)
                cls._end = cls._start + SLAB_BYTES
            start = cls._start
            cls._start += -(-num_bytes // ALIGNMENT) * ALIGNMENT
            return torch.frombuffer(cls._mapping, dtype=torch.uint8, offset=start, count=num_bytes)


_EMPTY = torch.empty(0, dtype=torch.uint8)


def _map_zeros(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Return a mapping, and where in it `num_bytes` begin at the boundary of a huge page."""
    mapping = _map(num_bytes + HUGE_PAGE_BYTES)
    start = -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
    _advise(mapping, "MADV_HUGEPAGE", start, num_bytes)
    return mapping, start


def _map(num_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {num_bytes} bytes: {error.strerror}") from None


def _advise(mapping: mmap.mmap, advice: str, start: int, num_bytes: int) -> None:
    """Tell the kernel how a part will be used; where it does not know the advice, the memory is only slower."""
    value = getattr(mmap, advice, None)
    if value is not None:
        with contextlib.suppress(OSError):
            mapping.madvise(value, start, num_bytes)


def _require_part(descriptor: int, path: Path, offset: int, num_bytes: int) -> None:
    size = os.fstat(descriptor).st_size
    if offset + num_bytes > size:
        raise ValueError(f"{path} has {size} bytes, not {offset + num_bytes}")
