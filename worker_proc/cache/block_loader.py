"""`BlockLoader`: fills blocks of the cache and writes blocks to files on threads of its own, while steps go on."""

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
"""Of the thread that writes files: it takes a tenth of a processor from steps at most, which is enough for writing what
they compute. At 19 it would take a hundredth, and contents would be lost while all processors are busy."""


class ContentStore(Protocol):
    """Where contents are kept outside of the workers' memory. Reads and writes have a thread each."""

    def read_all(self, folder: str, contents: Sequence[Content]) -> list[bool]:
        """Read contents; returns which of them were there."""

    def write_all(self, folder: str, contents: Sequence[Content]) -> list[bool]:
        """Write contents; returns which of them are there now."""

    def close(self) -> None:
        """Give up what is held."""


@dataclass(frozen=True, slots=True)
class FinishedTransfer:
    """What one command has loaded or stored."""

    sequence: int
    missing: list[BlockId]
    elapsed_s: float
    missing_states: list[BlockId] = field(default_factory=list)

    def reply(self, rank: int) -> BlocksLoaded:
        """Return the answer of a worker."""
        return BlocksLoaded(self.sequence, rank, self.missing, self.elapsed_s, self.missing_states)


class BlockLoader:
    """Executes `LoadBlocks` commands in order, and `StoreBlocks` commands. A file descriptor tells when one is done.

    Args:
        host: host memory to copy from; files are read and written through it.
        store: `None` if there is none.
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
        """Free rows for contents that are written to files."""
        first, num_state_rows = (states.first_staging_row, states.num_staging_rows) if states is not None else (0, 0)
        self._state_rows = deque(range(first, first + num_state_rows))
        """Likewise, for states."""

    def fileno(self) -> int:
        """Return the file descriptor to poll."""
        return self._fd

    def load(self, command: LoadBlocks, event: DeviceEvent) -> None:
        """Begin a load.

        Args:
            command: names its blocks.
            event: the steps before are over when it is done.
        """
        self._submit(self._load_thread, lambda: self._load(command, event))

    def store(self, command: StoreBlocks, record_event: Callable[[], DeviceEvent]) -> None:
        """Copy blocks or states for files and begin to write them. What does not fit into the rows is missing in the
        answer."""
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
        """Return what has ended since the last call. Never blocks.

        Raises:
            Exception: whatever a transfer has raised.
        """
        # Also without transfers: the last one may have been taken before its callback wrote to the descriptor.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        done = [transfer for transfer in self._transfers if transfer.done()]
        for transfer in done:
            self._transfers.remove(transfer)
        return [transfer.result() for transfer in done]

    def close(self) -> None:
        """End the threads. Blocks until: the transfers before are done."""
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
        """Read states into their places in host memory; returns those of which none has come."""
        contents = [(key, self._states_host.row(place)) for key, place in command.states_from_files]
        found = [False] * len(contents) if self._contents is None else self._contents.read_all(command.folder, contents)
        places = zip(command.states_from_files, found, strict=True)
        return [place for (_, place), is_there in places if not is_there]

    def _store(self, command: StoreBlocks, rows: list[int], event: DeviceEvent) -> FinishedTransfer:
        event.wait()
        started_s = time.perf_counter()
        missing = [block_id for block_id, _ in command.blocks[len(rows) :]]
        # A state is large enough for a pack of its own. All contents of a pack have one size.
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
    """Let this thread run where any thread of the process may.

    It inherits the one processor to which the thread that computes is bound, and would slow down every step there.
    """
    processors: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            processors |= os.sched_getaffinity(int(task.name))
    os.sched_setaffinity(0, processors)


def _yield_processors() -> None:
    """Let this thread run on any processor, after the threads that compute."""
    _use_all_processors()
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
