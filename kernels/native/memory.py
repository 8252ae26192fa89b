"""Memory for weights, caches and activations: aligned to huge pages, and files mapped into it.

Everything here is a `uint8` tensor over a mapping that ends with the last tensor over it. Huge pages (2 MiB instead of
4 KiB) spare the processor most of its page-table walks, which cost a reader of long streams a tenth of the memory
bandwidth and more (docs/performance.md). Decides nothing about what lies where inside a buffer.
"""

import contextlib
import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20


def allocate(num_bytes: int) -> Tensor:
    """Return `num_bytes` zeros, aligned to a huge page where they fill one.

    Memory is taken when a page is first written, by whole huge pages but for the last part of one, so a large buffer of
    which little is used costs little.

    Raises:
        MemoryError: the system does not promise that much.
    """
    mapping, start = _map_zeros(num_bytes)
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=start, count=num_bytes) if num_bytes else _EMPTY


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


class Arena:
    """Hands out parts of one large buffer, so that many small tensors share huge pages.

    The buffer lives as long as any of the parts.

    Args:
        num_bytes: of all parts together, each rounded up to `ALIGNMENT`.
    """

    ALIGNMENT = 64
    """A cache line, and the widest vector."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer = allocate(num_bytes)
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """Return the next part, zeros.

        Raises:
            MemoryError: the parts exceed the arena.
        """
        start = self._used
        if start + num_bytes > len(self._buffer):
            raise MemoryError(f"{num_bytes} bytes do not fit behind {start} of {len(self._buffer)}")
        self._used = start + -(-num_bytes // self.ALIGNMENT) * self.ALIGNMENT
        return self._buffer[start : start + num_bytes]


_EMPTY = torch.empty(0, dtype=torch.uint8)


def _map_zeros(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Return a mapping and where in it `num_bytes` begin, at the boundary of a huge page if they are as long as one."""
    if num_bytes < HUGE_PAGE_BYTES:
        return _map(max(num_bytes, 1)), 0
    mapping = _map(num_bytes + HUGE_PAGE_BYTES)
    start = -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
    _advise(mapping, "MADV_HUGEPAGE", start, num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
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
