"""`BlockFiles`: contents of blocks and states in files, for the workers of another engine. The core chooses the
blocks."""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from octavo.kernels import copy_blocks
from octavo.kernels.copy_blocks import native
from octavo.kernels.native.library import NativeLibrary
from octavo.protocol.kv_transfer import rank_file
from octavo.protocol.steps import BlockCopy
from octavo.protocol.worker_commands import BlockFilesCommand, LoadBlockFiles

_T = TypeVar("_T")


class BlockFiles:
    """Writes blocks and recurrent states of one worker to files in shared memory, and reads such files.

    A file holds blocks, then states. The parts of a block are stored together, in the order of the buffers, so workers
    of the same layout can read each other's files.

    Args:
        buffers: buffers of the cache; each is divided evenly among its blocks. [] for a pipeline stage without any.
        num_blocks: number of blocks of the cache.
        state_buffers: buffers of recurrent states, divided evenly among their slots; [] if there are none.
        num_states: number of state slots.
        library: copies on several threads; `None` if torch copies.
        num_threads: number of threads of the library.
    """

    def __init__(
        self,
        buffers: Sequence[Tensor],
        num_blocks: int,
        state_buffers: Sequence[Tensor] = (),
        num_states: int = 0,
        *,
        library: NativeLibrary | None = None,
        num_threads: int = 1,
    ) -> None:
        self._blocks = _Parts(buffers, num_blocks)
        self._states = _Parts(state_buffers, num_states)
        self._copy = (
            copy_blocks.copy_blocks
            if library is None
            else partial(native.copy_blocks, library, num_threads=num_threads)
        )

    def apply(self, command: BlockFilesCommand, rank: int) -> str:
        """Execute a command. Return why blocks were not saved, "" if they were.

        Raises:
            OSError, ValueError, RuntimeError: blocks cannot be loaded. Their contents are then undefined.
        """
        path = rank_file(command.path, rank)
        if isinstance(command, LoadBlockFiles):
            self.load(path, command.rows, command.state_rows, command.num_blocks)
            return ""
        try:
            self.save(path, command.blocks, command.states)
        except (OSError, RuntimeError) as error:  # torch's error if a file cannot be mapped
            return str(error)
        return ""

    def save(self, path: str, blocks: Sequence[int], states: Sequence[int] = ()) -> None:
        """Write blocks to a new file, one after another, then states. All steps that write them must be over.

        Raises:
            OSError: there is no room, or the file cannot be created.
        """
        num_bytes = self._num_bytes(len(blocks), len(states))
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            if num_bytes:
                os.posix_fallocate(
                    fd, 0, num_bytes
                )  # reports full memory as an error here, instead of a signal after mapping
        finally:
            os.close(fd)
        if not num_bytes:
            return
        mapped = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
        for parts, ids, rows in self._divide(mapped, len(blocks), blocks, states):
            if parts.is_on_host:
                self._copy(parts.buffers, rows, [(block, row) for row, block in enumerate(ids)])
                continue
            index = torch.tensor(list(ids))
            for part, buffer in zip(rows, parts.buffers, strict=True):
                part.copy_(buffer[index.to(buffer.device)])

    def load(
        self,
        path: str,
        rows: Sequence[BlockCopy],
        state_rows: Sequence[BlockCopy] = (),
        num_blocks: int = 0,
    ) -> None:
        """Read blocks and states from a file. All steps that read or write them must be over.

        Args:
            path: path of the file.
            rows: (index in the file, block) of each block to read.
            state_rows: (index among the states in the file, slot) of each state to read.
            num_blocks: number of blocks in the file, which come before the states.

        Raises:
            OSError, ValueError: the file cannot be read, or is too short.
        """
        size = Path(path).stat().st_size
        num_rows, num_states = (max([row for row, _ in each], default=-1) + 1 for each in (rows, state_rows))
        num_rows = max(num_rows, num_blocks)
        num_bytes = self._num_bytes(num_rows, num_states)
        if size < num_bytes:
            raise ValueError(
                f"{path} has {size} bytes, {num_rows} blocks of {self._blocks.num_bytes} and {num_states} states of "
                f"{self._states.num_bytes} were expected"
            )
        if not num_bytes:
            return
        mapped = torch.from_file(path, shared=False, size=num_bytes, dtype=torch.uint8)
        for parts, copies, file_rows in self._divide(mapped, num_rows, rows, state_rows):
            if parts.is_on_host:
                self._copy(file_rows, parts.buffers, copies)
                continue
            sources, blocks = torch.tensor(list(copies)).T
            for part, buffer in zip(file_rows, parts.buffers, strict=True):
                buffer[blocks.to(buffer.device)] = part[sources].to(buffer.device)
            torch.cuda.synchronize(parts.buffers[0].device)  # steps run on another stream

    def _num_bytes(self, num_blocks: int, num_states: int) -> int:
        return num_blocks * self._blocks.num_bytes + num_states * self._states.num_bytes

    def _divide(
        self, mapped: Tensor, num_blocks: int, blocks: Sequence[_T], states: Sequence[_T]
    ) -> Iterator[tuple["_Parts", Sequence[_T], list[Tensor]]]:
        """Yield the buffers of blocks and of states, the rows to copy, and their rows in the file."""
        end = num_blocks * self._blocks.num_bytes
        for parts, wanted, part in ((self._blocks, blocks, mapped[:end]), (self._states, states, mapped[end:])):
            if wanted and parts.buffers:
                yield parts, wanted, copy_blocks.parts_of(part.view(-1, parts.num_bytes), parts.buffers)


class _Parts:
    """Buffers that are divided evenly among blocks, or among state slots."""

    def __init__(self, buffers: Sequence[Tensor], num_blocks: int) -> None:
        self.buffers = [buffer.view(torch.uint8).view(num_blocks, -1) for buffer in buffers]
        self.num_bytes = sum(buffer.shape[1] for buffer in self.buffers)
        """Bytes of one block."""
        self.is_on_host = all(buffer.device.type == "cpu" for buffer in self.buffers)
