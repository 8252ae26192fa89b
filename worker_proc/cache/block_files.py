"""`BlockFiles`: contents of blocks in files, for the workers of another engine. Does not decide which."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from octavo.kernels import copy_blocks
from octavo.kernels.copy_blocks import native
from octavo.kernels.native.library import NativeLibrary
from octavo.protocol.kv_transfer import rank_file
from octavo.protocol.steps import BlockFilesCommand, LoadBlockFiles


class BlockFiles:
    """Writes blocks of one worker to files in shared memory, and reads such files. The parts of a block lie together,
    in the order of the buffers, so workers of the same layout read each other's files.

    Args:
        buffers: of the cache; each is divided evenly among its blocks. []: a pipeline stage without any.
        num_blocks: of the cache.
        library: copies on several threads; None: torch copies.
        num_threads: of the library.
    """

    def __init__(
        self, buffers: Sequence[Tensor], num_blocks: int, library: NativeLibrary | None = None, num_threads: int = 1
    ) -> None:
        self._cache = [buffer.view(torch.uint8).view(num_blocks, -1) for buffer in buffers]
        self._block_bytes = sum(buffer.shape[1] for buffer in self._cache)
        self._is_on_host = all(buffer.device.type == "cpu" for buffer in self._cache)
        self._copy = (
            copy_blocks.copy_blocks
            if library is None
            else partial(native.copy_blocks, library, num_threads=num_threads)
        )

    def apply(self, command: BlockFilesCommand, rank: int) -> str:
        """Carry out a command; returns why blocks were not saved, "" if they were.

        Raises:
            OSError, ValueError, RuntimeError: blocks cannot be loaded. Nobody knows any more what they hold.
        """
        path = rank_file(command.path, rank)
        if isinstance(command, LoadBlockFiles):
            self.load(path, command.rows)
            return ""
        try:
            self.save(path, command.blocks)
        except (OSError, RuntimeError) as error:  # torch's error if a file cannot be mapped
            return str(error)
        return ""

    def save(self, path: str, blocks: Sequence[int]) -> None:
        """Write blocks to a new file, one after another. No step that writes them may be unfinished.

        Raises:
            OSError: there is no room, or the file cannot be made.
        """
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            if num_bytes := len(blocks) * self._block_bytes:
                os.posix_fallocate(fd, 0, num_bytes)  # a full memory is an error here, and a signal while it is mapped
        finally:
            os.close(fd)
        rows = self._rows(path, len(blocks), shared=True)
        if self._is_on_host:
            self._copy(self._cache, rows, [(block, row) for row, block in enumerate(blocks)])
            return
        index = torch.tensor(list(blocks))
        for part, buffer in zip(rows, self._cache, strict=True):
            part.copy_(buffer[index.to(buffer.device)])

    def load(self, path: str, rows: Sequence[tuple[int, int]]) -> None:
        """Read blocks from a file. No step that reads or writes them may be unfinished.

        Args:
            path: of the file.
            rows: index in the file, and block.

        Raises:
            OSError, ValueError: the file cannot be read, or is too short.
        """
        size, num_rows = Path(path).stat().st_size, max([row for row, _ in rows], default=-1) + 1
        if size < num_rows * self._block_bytes:
            raise ValueError(f"{path} has {size} bytes, {num_rows} blocks of {self._block_bytes} were expected")
        parts = self._rows(path, num_rows, shared=False)
        if self._is_on_host:
            self._copy(parts, self._cache, rows)
            return
        sources, blocks = torch.tensor(list(rows)).T
        for part, buffer in zip(parts, self._cache, strict=True):
            buffer[blocks.to(buffer.device)] = part[sources].to(buffer.device)
        torch.cuda.synchronize(self._cache[0].device)  # steps run on a stream of their own

    def _rows(self, path: str, num_rows: int, *, shared: bool) -> list[Tensor]:
        """Return the file's parts of blocks, one tensor for each buffer; the tensors keep it mapped."""
        if not self._cache or not num_rows:
            return []
        size = num_rows * self._block_bytes
        mapped = torch.from_file(path, shared=shared, size=size, dtype=torch.uint8)
        return copy_blocks.parts_of(mapped.view(num_rows, self._block_bytes), self._cache)
