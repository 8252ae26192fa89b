"""Files of KV blocks on the virtual clock. They outlive workers and cores, engines share them, and some are damaged."""

import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

from octavo.core_proc.file_watch import FileChanges
from octavo.protocol.worker_commands import BlocksLoaded, StoreBlocks
from simulation.worker import SimulatedWorker
from simulation.world import Process

RankFiles: TypeAlias = dict[bytes, list[int | None] | None]
"""The contents of one rank's files by key; None: a damaged one."""

SHARE_TORN = 0.03
SHARE_NOT_WRITTEN = 0.05
SHARE_DELETED = 0.1


class SimulatedFiles:
    """The files of all ranks, in one directory.

    Args:
        seed: seed of what becomes of them.
        num_ranks: number of ranks of each engine.
        max_files: when there are more, a sweep deletes some.
    """

    def __init__(self, seed: int, num_ranks: int, max_files: int) -> None:
        self.rng = random.Random(f"files {seed}")
        self.ranks: list[RankFiles] = [{} for _ in range(num_ranks)]
        self.max_files = max_files

    def store(
        self,
        process: Process,
        worker: SimulatedWorker,
        command: StoreBlocks,
        scale: float,
        reply: Callable[[BlocksLoaded], None],
    ) -> None:
        """Write blocks one after another, as they are now. If the process dies meanwhile, the rest is not written."""
        delay, missing = 0.0, list[int]()
        for (block_id, _), (key, states) in zip(command.blocks, worker.copies_for_files(command), strict=True):
            if self.rng.random() < SHARE_NOT_WRITTEN:
                missing.append(block_id)
                continue
            delay += scale * self.rng.choice([0.0, 0.1, 3.0])
            is_torn = self.rng.random() < SHARE_TORN
            process.after(delay, lambda key=key, states=None if is_torn else states: worker.write_file(key, states))
        process.after(delay, lambda: reply(BlocksLoaded(command.sequence, 0, missing)))


class SimulatedWatch:
    """Lists the files now and then, and deletes some; replaces `FileWatch`.

    Args:
        files: files of all ranks.
        process: the core.
        scale: typical duration of a step, in seconds.
        on_event: called when `take` has something.
    """

    def __init__(self, files: SimulatedFiles, process: Process, scale: float, on_event: Callable[[], None]) -> None:
        self._files = files
        self._process = process
        self._scale = scale
        self._on_event = on_event
        self._known: set[bytes] = set()
        self._changes: list[FileChanges] = []
        self._sweep_later()

    def fileno(self) -> int:
        """See `FileWatch`."""
        return -1

    def take(self) -> list[FileChanges]:
        """See `FileWatch`."""
        changes, self._changes = self._changes, []
        return changes

    def delete(self, keys: Sequence[bytes]) -> None:
        """See `FileWatch`."""

        def delete() -> None:
            for rank in self._files.ranks:
                for key in keys:
                    rank.pop(key, None)

        self._process.after(self._scale * self._files.rng.random(), delete)

    def list_soon(self) -> None:
        """See `FileWatch`."""
        self._process.after(0.0, self._sweep)

    def note_written(self, num_bytes: int) -> None:
        """See `FileWatch`."""
        assert num_bytes > 0
        self._sweep_later()

    def _sweep_later(self) -> None:
        self._process.after(self._scale * self._files.rng.choice([0.1, 10.0, 100.0]), self._sweep)

    def _sweep(self) -> None:
        first, rng = self._files.ranks[0], self._files.rng
        if len(first) > self._files.max_files:
            for key in [key for key in first if rng.random() < SHARE_DELETED]:
                for rank in self._files.ranks:
                    rank.pop(key, None)
        changes = FileChanges(sorted(first.keys() - self._known), sorted(self._known - first.keys()))
        self._known = set(first)
        if changes.added or changes.removed:
            self._changes.append(changes)
            self._on_event()
