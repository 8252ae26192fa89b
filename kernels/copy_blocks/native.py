"""`copy_blocks` in C++, on several threads: its arguments, mirrored from `native.h`."""

import ctypes
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from octavo.kernels.native.arguments import Arguments
from octavo.kernels.native.direct import run
from octavo.kernels.native.library import NativeLibrary

MIN_THREAD_BYTES = 1 << 20
"""Minimum bytes that a thread copies: waking another thread takes longer than copying less."""


class BlockBuffer(ctypes.Structure):
    """See `BlockBuffer` in `native.h`."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("source_stride", ctypes.c_int64),
        ("destination", ctypes.c_void_p),
        ("destination_stride", ctypes.c_int64),
        ("block_bytes", ctypes.c_int64),
    )


class CopyBlocksArguments(Arguments):
    """See `CopyBlocksArgs`."""

    _fields_ = (
        ("buffers", ctypes.POINTER(BlockBuffer)),
        ("num_buffers", ctypes.c_int64),
        ("pairs", ctypes.c_void_p),
        ("num_pairs", ctypes.c_int64),
    )


class BlockCopier:
    """Copies blocks from each source buffer to the destination buffer with the same index, all in host memory.

    It keeps the addresses of the buffers, because looking up the addresses of 60 buffers takes as long as copying a
    block.

    Args:
        library: the native library.
        sources: bytes_PB, uint8: see `octavo.kernels.copy_blocks.copy_blocks`. They must outlive this object.
        destinations: likewise.
    """

    def __init__(self, library: NativeLibrary, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
        self._library = library
        self._num_buffers = len(sources)
        self._buffers = (BlockBuffer * len(sources))(
            *(
                BlockBuffer(a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0), a.shape[1])
                for a, b in zip(sources, destinations, strict=True)
            )
        )
        self._block_bytes = sum(source.shape[1] for source in sources)

    def copy(self, pairs: Sequence[tuple[int, int]], num_threads: int = 1) -> None:
        """Copy blocks, given as (source, destination) pairs. Blocks until they are copied."""
        if not self._num_buffers or not pairs:
            return
        pairs_N2 = np.array(pairs, dtype=np.int64)
        num_bytes = len(pairs) * self._block_bytes
        run(
            self._library,
            "copy_blocks",
            CopyBlocksArguments(self._buffers, self._num_buffers, pairs_N2.ctypes.data, len(pairs)),
            num_threads=max(1, min(num_threads, num_bytes // MIN_THREAD_BYTES)),
        )


def copy_blocks(
    library: NativeLibrary,
    sources: Sequence[Tensor],
    destinations: Sequence[Tensor],
    pairs: Sequence[tuple[int, int]],
    num_threads: int = 1,
) -> None:
    """See `octavo.kernels.copy_blocks.copy_blocks`; all buffers are in host memory."""
    BlockCopier(library, sources, destinations).copy(pairs, num_threads)
