"""Memory for weights, caches and activations: buffers aligned to huge pages, and mapped files.

Every buffer here is a `uint8` tensor over a mapping, which is freed with the last tensor over it. Huge pages (2 MiB
instead of 4 KiB) avoid most page-table walks, which cost streaming reads a tenth or more of the memory bandwidth
(docs/performance.md). The layout inside a buffer is not defined here.
"""

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
SMALL_PAGE_BYTES = 4 << 10
SLAB_BYTES = 32 << 20
ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vector."""
_MADV_POPULATE_WRITE = 23
"""madvise advice of Linux 5.14 and newer."""
_MADV_PAGEOUT = 21
"""madvise advice of Linux 5.4 and newer; Python's mmap has no constant for it."""


def allocate(num_bytes: int, page_offset: int = 0) -> Tensor:
    """Return `num_bytes` zeros, aligned to 64 bytes; a large buffer is aligned to a huge page.

    Memory is allocated when it is first written, in huge pages if the system has them, so the unused part of a large
    buffer costs nothing. Buffers smaller than half a slab share one; otherwise the many small weights of a model would
    have no huge pages. The pages of each buffer are freed with it, the address range of a slab with its last buffer.

    Args:
        num_bytes: size of the buffer.
        page_offset: offset in a huge page at which a large buffer begins, a multiple of `SMALL_PAGE_BYTES`. The part
            before the first complete huge page has small pages.

    Raises:
        MemoryError: the system cannot reserve that much.
    """
    if num_bytes == 0:
        return _EMPTY
    if num_bytes < SLAB_BYTES // 2:
        return _Slab.take(num_bytes)
    mapping, start = _map_zeros(num_bytes, page_offset)
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=start, count=num_bytes)


def map_file(path: Path, offset: int, num_bytes: int) -> Tensor:
    """Return a part of a file as a tensor, read on demand and shared with other processes that map the file.

    Writing to the tensor changes this process's copy of a page, never the file. Newer kernels (seen with 6.18 and ext4)
    map files with huge pages if the page cache holds them in large folios; reading is then as fast as with `allocate`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is too short for the part.
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


def give_back_pages(buffers: Sequence[Tensor]) -> None:
    """Release the physical pages of buffers: those of a mapped file at once, others if the system can swap.

    Reading brings the pages back, with their contents.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for buffer in buffers:
        start = -(-buffer.data_ptr() // SMALL_PAGE_BYTES) * SMALL_PAGE_BYTES
        end = (buffer.data_ptr() + buffer.nbytes) // SMALL_PAGE_BYTES * SMALL_PAGE_BYTES
        if end > start:  # an error means that the kernel does not know the advice: the pages stay
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_PAGEOUT)


def populate(buffer: Tensor) -> bool:
    """Have the kernel allocate the pages of a buffer before they are written; changes no content.

    Returns:
        False if the kernel does not know the advice; it then allocates pages when they are written.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    start = -(-buffer.data_ptr() // SMALL_PAGE_BYTES) * SMALL_PAGE_BYTES
    end = (buffer.data_ptr() + buffer.nbytes) // SMALL_PAGE_BYTES * SMALL_PAGE_BYTES
    return end <= start or not libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_POPULATE_WRITE)


class _Slab:
    """Mapping from which small buffers are cut until it is used up."""

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
            piece = (ctypes.c_char * num_bytes).from_buffer(cls._mapping, start)
            weakref.finalize(piece, _give_up, cls._mapping, start, num_bytes).atexit = False
            return torch.frombuffer(piece, dtype=torch.uint8)


def _give_up(mapping: mmap.mmap, start: int, num_bytes: int) -> None:
    """Return the pages of a piece to the system, except pages shared with neighbouring pieces."""
    first = -(-start // SMALL_PAGE_BYTES) * SMALL_PAGE_BYTES
    end = (start + num_bytes) // SMALL_PAGE_BYTES * SMALL_PAGE_BYTES
    if end > first:
        _advise(mapping, "MADV_DONTNEED", first, end - first)


_EMPTY = torch.empty(0, dtype=torch.uint8)


def _map_zeros(num_bytes: int, page_offset: int = 0) -> tuple[mmap.mmap, int]:
    """Return a mapping, and the offset in it at which `num_bytes` begin, `page_offset` bytes into a huge page."""
    mapping = _map(num_bytes + HUGE_PAGE_BYTES)
    address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    start = (page_offset - address) % HUGE_PAGE_BYTES
    num_before = min(-page_offset % HUGE_PAGE_BYTES, num_bytes)
    if num_before:
        # A huge page here would begin before the buffer, and the part before it would never be used.
        _advise(mapping, "MADV_NOHUGEPAGE", start, num_before)
    _advise(mapping, "MADV_HUGEPAGE", start + num_before, num_bytes - num_before)
    return mapping, start


def _map(num_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {num_bytes} bytes: {error.strerror}") from None


def _advise(mapping: mmap.mmap, advice: str, start: int, num_bytes: int) -> None:
    """Advise the kernel how a part will be used. If it does not know the advice, memory is only slower."""
    value = getattr(mmap, advice, None)
    if value is not None:
        with contextlib.suppress(OSError):
            mapping.madvise(value, start, num_bytes)


def _require_part(descriptor: int, path: Path, offset: int, num_bytes: int) -> None:
    size = os.fstat(descriptor).st_size
    if offset + num_bytes > size:
        raise ValueError(f"{path} has {size} bytes, not {offset + num_bytes}")
