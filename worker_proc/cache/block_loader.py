"""`BlockLoader`: fills blocks of the cache and writes blocks to files, on its own threads, while steps run."""

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from octavo.protocol.block_packs import MAX_CONTENTS
from octavo.protocol.errors import ProtocolError
from octavo.protocol.ids import BlockId
from octavo.protocol.worker_commands import BlocksLoaded, LoadBlocks, StoreBlocks
from octavo.worker_proc.cache.content_files import Content
from octavo.worker_proc.cache.host_blocks import HostBlocks
from octavo.worker_proc.device.stream import DeviceEvent

NICENESS = 10
"""Niceness of the thread that writes files. It takes at most a tenth of a processor from steps, which is enough to
write what they compute. At 19 it would get a hundredth, and contents would be lost while all processors are busy."""


class ContentStore(Protocol):
    """Storage of block contents outside of the workers' memory. Reads and writes have one thread each."""

    def read_all(self, folder: str, contents: Sequence[Content]) -> list[bool]:
        """Read contents. Return for each whether it was found."""

    def write_all(self, folder: str, contents: Sequence[Content]) -> list[bool]:
        """Write contents. Return for each whether it is stored now."""

    def close(self) -> None:
        """Release all resources."""


@dataclass(frozen=True, slots=True)
class FinishedTransfer:
    """The blocks that one command loaded or stored."""

    sequence: int
    missing: list[BlockId]
    elapsed_s: float
    missing_states: list[BlockId] = field(default_factory=list)

    def reply(self, rank: int) -> BlocksLoaded:
        """Return the worker's reply."""
        return BlocksLoaded(self.sequence, rank, self.missing, self.elapsed_s, self.missing_states)


class BlockLoader:
    """Executes `LoadBlocks` commands in order, and `StoreBlocks` commands. A file descriptor signals finished ones.

    Args:
        host: host memory to copy from; files are read and written through it.
        store: files or a connector; `None` if there is none.
        states: host memory for recurrent states; `None` if the engine keeps none there.
    """

    def __init__(self, host: HostBlocks, store: ContentStore | None = None, states: HostBlocks | None = None) -> None:
        self._host, self._states = host, states
        self._contents = store
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        self._load_thread = ThreadPoolExecutor(1, "load blocks", initializer=_use_all_processors)
        self._store_thread = ThreadPoolExecutor(1, "store blocks", initializer=_yield_processors)
        self._transfers: deque[Future[FinishedTransfer]] = deque()
        num_rows = host.num_staging_rows
        self._load_rows = range(host.first_staging_row, host.first_staging_row + num_rows // 4)
        self._store_rows = deque(range(host.first_staging_row + num_rows // 4, host.first_staging_row + num_rows))
        """Free staging rows for contents that are written to files."""
        first, num_state_rows = (states.first_staging_row, states.num_staging_rows) if states is not None else (0, 0)
        self._state_rows = deque(range(first, first + num_state_rows))
        """Free staging rows for states that are written to files."""

    def fileno(self) -> int:
        """Return the file descriptor to poll."""
        return self._fd

    def load(self, command: LoadBlocks, event: DeviceEvent) -> None:
        """Begin a load.

        Args:
            command: names the blocks to load.
            event: done when all earlier steps are over.
        """
        self._submit(self._load_thread, lambda: self._load(command, event))

    def store(self, command: StoreBlocks, record_event: Callable[[], DeviceEvent]) -> None:
        """Copy blocks or states to staging rows and begin to write them to files.

        The reply omits contents that do not fit into the rows.
        """
        host, rows = (self._states_host, self._state_rows) if command.are_states else (self._host, self._store_rows)
        free = [rows.popleft() for _ in range(min(len(rows), len(command.blocks)))]
        blocks = command.blocks[: len(free)]
        host.copy_out([(block_id, row) for (block_id, _), row in zip(blocks, free, strict=True)])
        event = record_event()
        self._submit(self._store_thread, lambda: self._store(command, free, event))

    @property
    def _states_host(self) -> HostBlocks:
        if self._states is None:
            raise ProtocolError("states are to be read or written, but host memory was allocated for none")
        return self._states

    def take_finished(self) -> list[FinishedTransfer]:
        """Return the transfers that finished since the last call. Never blocks.

        Raises:
            Exception: raised by a transfer.
        """
        # Even without transfers: the last one may have been taken before its callback wrote to the descriptor.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        done = [transfer for transfer in self._transfers if transfer.done()]
        for transfer in done:
            self._transfers.remove(transfer)
        return [transfer.result() for transfer in done]

    def close(self) -> None:
        """End the threads. Blocks until all earlier transfers are done."""
        self._load_thread.shutdown()
        self._store_thread.shutdown()
        if self._contents is not None:
            self._contents.close()
        self._close_fd()

    def _submit(self, thread: ThreadPoolExecutor, body: Callable[[], FinishedTransfer]) -> None:
        transfer = thread.submit(body)
        self._transfers.append(transfer)
        transfer.add_done_callback(lambda _: os.eventfd_write(self._fd, 1))

    @torch.inference_mode()
    def _load(self, command: LoadBlocks, event: DeviceEvent) -> FinishedTransfer:
        event.wait()
        started_s = time.perf_counter()
        self._host.load(command.from_host)
        missing: list[BlockId] = []
        num_rows = len(self._load_rows)
        for start in range(0, len(command.from_files), num_rows or 1):
            part, rows = command.from_files[start : start + num_rows], self._load_rows
            contents = [(key, self._host.row(row)) for row, (key, _) in zip(rows, part, strict=False)]
            store = self._contents
            found = [False] * len(part) if store is None else store.read_all(command.folder, contents)
            missing += [block_id for (_, block_id), is_there in zip(part, found, strict=True) if not is_there]
            self._host.load(
                [(row, block_id) for row, (_, block_id), is_there in zip(rows, part, found, strict=False) if is_there]
            )
        missing_states = self._load_states(command) if command.states_from_files else []
        return FinishedTransfer(command.sequence, missing, time.perf_counter() - started_s, missing_states)

    def _load_states(self, command: LoadBlocks) -> list[BlockId]:
        """Read states into their rows of host memory. Return those that were not found."""
        contents = [(key, self._states_host.row(place)) for key, place in command.states_from_files]
        found = [False] * len(contents) if self._contents is None else self._contents.read_all(command.folder, contents)
        places = zip(command.states_from_files, found, strict=True)
        return [place for (_, place), is_there in places if not is_there]

    def _store(self, command: StoreBlocks, rows: list[int], event: DeviceEvent) -> FinishedTransfer:
        event.wait()
        started_s = time.perf_counter()
        missing = [block_id for block_id, _ in command.blocks[len(rows) :]]
        # A state is large enough for its own pack. All contents of a pack have the same size.
        host, free, num_contents = self._host, self._store_rows, MAX_CONTENTS
        if command.are_states:
            host, free, num_contents = self._states_host, self._state_rows, 1
        for start in range(0, len(rows), num_contents):
            part, blocks = rows[start : start + num_contents], command.blocks[start:]
            contents = [(key, host.row(row)) for row, (_, key) in zip(part, blocks, strict=False)]
            store = self._contents
            written = [False] * len(part) if store is None else store.write_all(command.folder, contents)
            missing += [block_id for (block_id, _), is_there in zip(blocks, written, strict=False) if not is_there]
            free.extend(part)
        return FinishedTransfer(command.sequence, missing, time.perf_counter() - started_s)


def _use_all_processors() -> None:
    """Let this thread run on all processors of the process.

    It inherits the one processor to which the computing thread is bound, and would slow down every step there.
    """
    processors: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            processors |= os.sched_getaffinity(int(task.name))
    os.sched_setaffinity(0, processors)


def _yield_processors() -> None:
    """Let this thread run on any processor, with lower priority than the threads that compute."""
    _use_all_processors()
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
