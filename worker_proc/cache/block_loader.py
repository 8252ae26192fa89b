"""`BlockLoader`: fills blocks of the cache on a thread of its own, while steps go on."""

import contextlib
import os
import time
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from octavo.protocol.ids import BlockId
from octavo.protocol.steps import LoadBlocks
from octavo.worker_proc.cache.host_blocks import HostBlocks
from octavo.worker_proc.device.stream import DeviceEvent


@dataclass(frozen=True, slots=True)
class FinishedLoad:
    """What one command has loaded."""

    sequence: int
    missing: list[BlockId]
    elapsed_s: float


class BlockLoader:
    """Executes `LoadBlocks` commands in order. A file descriptor tells when one is done.

    Args:
        host: what it copies from.
    """

    def __init__(self, host: HostBlocks) -> None:
        self._host = host
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        self._thread = ThreadPoolExecutor(1, "block loader", initializer=_use_all_processors)
        self._loads: deque[Future[FinishedLoad]] = deque()

    def fileno(self) -> int:
        """Return the file descriptor to poll."""
        return self._fd

    def begin(self, command: LoadBlocks, event: DeviceEvent) -> None:
        """Begin a load.

        Args:
            command: names its blocks.
            event: the steps before are over when it is done.
        """
        load = self._thread.submit(self._load, command, event)
        self._loads.append(load)
        load.add_done_callback(lambda _: os.eventfd_write(self._fd, 1))

    def take_finished(self) -> list[FinishedLoad]:
        """Return the loads that have ended since the last call. Never blocks.

        Raises:
            Exception: whatever a load has raised.
        """
        if not self._loads:  # perf: the command loop asks after each command
            return []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        finished = []
        while self._loads and self._loads[0].done():
            finished.append(self._loads.popleft().result())
        return finished

    def close(self) -> None:
        """End the thread. Blocks until: the loads before are done."""
        self._thread.shutdown()
        self._close_fd()

    @torch.inference_mode()
    def _load(self, command: LoadBlocks, event: DeviceEvent) -> FinishedLoad:
        event.wait()
        started_s = time.perf_counter()
        self._host.load(command.from_host)
        return FinishedLoad(command.sequence, [], time.perf_counter() - started_s)


def _use_all_processors() -> None:
    """Let this thread run where any thread of the process may.

    It inherits the one processor to which the thread that computes is bound, and would slow down every step there.
    """
    processors: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            processors |= os.sched_getaffinity(int(task.name))
    os.sched_setaffinity(0, processors)
