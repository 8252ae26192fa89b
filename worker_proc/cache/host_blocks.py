"""`HostBlocks`: host memory for the contents of evicted blocks. The core chooses them."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from octavo.kernels import copy_blocks
from octavo.kernels.copy_blocks import native
from octavo.kernels.native import memory
from octavo.kernels.native.library import NativeLibrary
from octavo.protocol.steps import BlockCopy
from octavo.worker_proc.cache.prefault import IDLE_MS
from octavo.worker_proc.device.stream import Stream

CopyPairs: TypeAlias = Callable[[Sequence[BlockCopy]], None]
"""Copies blocks, given as (source, destination)."""


class HostBlocks:
    """Blocks in host memory, pinned if a GPU copies them. The parts of a block, of all layers, are adjacent.

    A GPU copies on the stream of its steps, so copies and steps run in the order of the plans.

    Args:
        buffers: buffers of the cache; each is divided evenly among its blocks. []: a pipeline stage without any. Or
            those of recurrent states, whose slots are copied like blocks.
        num_blocks: number of blocks of the cache.
        num_host_blocks: number of blocks in host memory.
        library: copies on several threads; `None` if torch or a GPU copies.
        num_threads: number of threads of the library.
        stream: stream of the device; `None` if the host computes.
        num_staging_rows: further rows of host memory through which files are read and written.

    Raises:
        MemoryError, RuntimeError: not enough memory.
    """

    def __init__(
        self,
        buffers: Sequence[Tensor],
        num_blocks: int,
        num_host_blocks: int,
        library: NativeLibrary | None = None,
        num_threads: int = 1,
        stream: Stream | None = None,
        num_staging_rows: int = 0,
    ) -> None:
        self.first_staging_row = num_host_blocks
        """Index of the first staging row. Staging rows are addressed like blocks."""
        self.num_staging_rows = num_staging_rows
        num_host_blocks += num_staging_rows
        self._stream = stream
        self._unpopulated: deque[Tensor] = deque()
        """Parts of the memory that have not been touched yet."""
        self._cache = [buffer.view(torch.uint8).view(num_blocks, -1) for buffer in buffers]
        block_bytes = sum(buffer.shape[1] for buffer in self._cache)
        if buffers and buffers[0].device.type != "cpu":
            memory_B = torch.empty(num_host_blocks * block_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            memory_B = memory.allocate(num_host_blocks * block_bytes)
            self._unpopulated.extend(memory_B.split(memory.HUGE_PAGE_BYTES))
        self._host_PB = memory_B.view(num_host_blocks, block_bytes)
        self._parts = copy_blocks.parts_of(self._host_PB, self._cache)
        is_native = library is not None and not self._host_PB.is_pinned()
        self._copy_out: CopyPairs = partial(copy_blocks.copy_blocks, self._cache, self._parts)
        self._copy_in: CopyPairs = partial(copy_blocks.copy_blocks, self._parts, self._cache)
        self._copy_in_aside: CopyPairs = self._copy_in
        if library is not None and is_native:
            self._copy_out = partial(
                native.BlockCopier(library, self._cache, self._parts).copy, num_threads=num_threads
            )
            copier = native.BlockCopier(library, self._parts, self._cache)
            self._copy_in, self._copy_in_aside = partial(copier.copy, num_threads=num_threads), copier.copy

    def on_idle(self, wait_for_command: Callable[[int], object]) -> None:
        """Have the system allocate the memory while the worker is idle: a step would wait 3 ms for each huge page.

        Args:
            wait_for_command: see `Prefaulter.touch_pages`.
        """
        wait_ms = IDLE_MS
        while self._unpopulated and not wait_for_command(wait_ms):
            if not memory.populate(self._unpopulated.popleft()):
                self._unpopulated.clear()
            wait_ms = 0

    def apply(self, copies_out: Sequence[BlockCopy], copies_in: Sequence[BlockCopy]) -> None:
        """Make the copies of a plan, which come before its step. On a GPU, only enqueue them."""
        self._copy_out(copies_out)
        self._copy_in(copies_in)

    def copy_out(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks to host memory, as they are after all earlier steps. On a GPU, only enqueue the copies."""
        self._copy_out(copies)

    def row(self, index: int) -> memoryview:
        """Return the bytes of a block in host memory."""
        content: Any = self._host_PB[index].numpy()
        return memoryview(content)

    def load(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in, on a thread other than that of the steps, which continue.

        All steps begun before these blocks were allocated must be over. Blocks until the copies are made.
        """
        copy = partial(self._copy_in_aside, copies)
        if self._stream is None:
            copy()
        else:
            self._stream.run_aside(copy)
