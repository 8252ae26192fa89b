"""`FileStore`: has the workers write full blocks to files, and tells the scheduler which files exist."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from octavo.core_proc.block_transfers import LoadingWorkers
from octavo.core_proc.cache.files import FileTier
from octavo.core_proc.cache.pool import BlockPool
from octavo.core_proc.file_watch import FileChanges, FileWatch
from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.scheduler.stop import FinishCause
from octavo.core_proc.workers.commands import CombinedReply
from octavo.protocol.block_packs import MAX_CONTENTS
from octavo.protocol.config import CachePlan, ResolvedConfig
from octavo.protocol.errors import StartupError
from octavo.protocol.ids import BlockId
from octavo.protocol.worker_commands import StoreBlocks

logger = logging.getLogger(__name__)

LAYOUT_VERSION = 2
"""Version of the file layout. Increase it when the layout changes."""

MAX_DELAY_STEPS = 16
"""Most steps that a block waits for other blocks that share its file. Waiting blocks are lost in a crash."""

MIN_FREE_BLOCKS = 4 * MAX_CONTENTS
"""If fewer blocks are free, blocks that wait to be written may be evicted soon."""


class ContentWatch(Protocol):
    """Knows which blocks are stored, besides those that this engine has just written. See `FileWatch`."""

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when `take` has changes."""

    def take(self) -> list[FileChanges]:
        """Return the changes since the last call. Never blocks."""

    def delete(self, keys: Sequence[bytes]) -> None:
        """Schedule the deletion of these keys for all ranks."""

    def list_soon(self) -> None:
        """List the stored keys again soon. Used when workers died and it is unknown how much they have written."""

    def note_written(self, num_bytes: int) -> None:
        """Count the bytes that the workers have written."""


class FileStore:
    """A step hook that observes the scheduler's cache and states. Everything that can be looked up there is written to
    files.

    Blocks are written when they are full, not when they are evicted: after a crash, a restart is fast because of what
    was computed before it. Blocks wait a few steps for others, because one file per block would cost more than the
    block. Workers write the blocks in a separate thread, as they are after the latest plan.

    Args:
        scheduler: the engine's scheduler.
        workers: write the files.
        folder: the folder of this engine's files.
        watch: watches the directory.
        block_bytes: bytes of a block, all ranks together.
        state_bytes: bytes of a recurrent state, all ranks together.
        finds: whether this engine may load what it has written.
        min_free_blocks: if fewer blocks are free, blocks are written without waiting for others.
        saves: whether the workers write at all.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        workers: LoadingWorkers,
        folder: str,
        watch: ContentWatch,
        block_bytes: int,
        state_bytes: int = 0,
        *,
        finds: bool = True,
        saves: bool = True,
        min_free_blocks: int = MIN_FREE_BLOCKS,
    ) -> None:
        self._finds = finds
        self._saves = saves
        self._min_free_blocks = min_free_blocks
        self.folder = folder
        self._scheduler = scheduler
        self._workers = workers
        self._block_bytes, self._state_bytes = block_bytes, state_bytes
        self._watch = watch
        self._wanted: dict[bytes, BlockId] = {}
        """Blocks by key that are full after the latest plan and that the workers were not yet told to write."""
        self._wanted_states: dict[bytes, BlockId] = {}
        """Slots of checkpoints of recurrent states, likewise. They are too large to wait for others."""
        self._first_wanted_step = 0
        """Number of steps planned before the first of these blocks."""
        self._storing: set[bytes] = set()
        """Keys that the workers are writing now."""
        scheduler.cache.add_observer(self)
        scheduler.hooks.add(self)
        if scheduler.cache.states is not None:
            scheduler.cache.states.add_observer(self)

    @property
    def wake_fds(self) -> Sequence[int]:
        """See `StepHook`."""
        return [self._watch.fileno()]

    def on_stored(self, request: Request, index: int, group: int) -> None:
        """See `CacheObserver`."""
        if self._saves and request.block_ids:  # requests without blocks are being loaded
            key = request.block_hashes[index] + self._scheduler.cache.groups.key_suffixes[group]
            if not self._wanted:
                self._first_wanted_step = self._scheduler.counters.num_steps
            self._wanted[key] = request.block_ids[group][index]

    def on_state_stored(self, request: Request, num_blocks: int, slot: BlockId, *, is_computed: bool) -> None:
        """See `StateObserver`."""
        if self._saves and is_computed and (states := self._scheduler.cache.states) is not None:
            self._wanted_states[states.key(request, num_blocks)] = slot

    def on_removed(self, block_hash: bytes) -> None:
        """See `ContentObserver`."""

    def on_cleared(self) -> None:
        """See `ContentObserver`."""

    def on_step(self) -> list[ClientEvent]:
        """See `StepHook`."""
        files = self._scheduler.cache.files
        if files is None:
            return []
        cache = self._scheduler.cache
        if self._wanted and self._is_due:
            wanted, self._wanted = self._wanted, {}
            self._store(files, self._missing(files, wanted, cache.pool))
        if self._wanted_states and cache.states is not None:
            wanted, self._wanted_states = self._wanted_states, {}
            self._store(files, self._missing(files, wanted, cache.states.pool), are_states=True)
        for changes in self._watch.take():
            self._scheduler.change_files(changes.added, changes.removed)
        if files.discarded:
            self._storing.difference_update(files.discarded)
            self._watch.delete(files.discarded)
            files.discarded = []
        return []

    @property
    def _is_due(self) -> bool:
        """Whether the full blocks should be written now."""
        scheduler = self._scheduler
        return (
            len(self._wanted) >= MAX_CONTENTS
            or scheduler.counters.num_steps >= self._first_wanted_step + MAX_DELAY_STEPS
            or scheduler.cache.pool.num_free < self._min_free_blocks
            or not scheduler.has_requests
        )

    def finish_cause(self, request: Request, cause: FinishCause) -> FinishCause:
        """See `StepHook`."""
        return cause

    def _missing(self, files: FileTier, wanted: dict[bytes, BlockId], pool: BlockPool) -> dict[bytes, BlockId]:
        """Return the blocks that are in no file yet and were not evicted meanwhile."""
        missing = [key for key in wanted if key not in files and key not in self._storing]
        return {key: wanted[key] for key in missing if pool.find(key) == wanted[key]}

    def _store(self, files: FileTier, blocks: dict[bytes, BlockId], *, are_states: bool = False) -> None:
        if not blocks or not files.is_open:
            return
        num_bytes = self._state_bytes if are_states else self._block_bytes

        def finish(reply: CombinedReply) -> None:
            files.num_storing -= len(blocks)
            written = [key for key in blocks if blocks[key] not in reply.missing]
            wanted = [key for key in written if key in self._storing]
            if len(wanted) < len(written):  # some blocks were discarded meanwhile
                self._watch.delete([key for key in written if key not in self._storing])
            self._storing.difference_update(blocks)
            if reply.fault:
                self._watch.list_soon()
            elif wanted:
                if self._finds:
                    self._scheduler.change_files(wanted, ())
                self._watch.note_written(len(wanted) * num_bytes)

        files.num_storing += len(blocks)
        self._storing.update(blocks)
        pairs = [(block_id, key) for key, block_id in blocks.items()]
        self._workers.load_blocks(lambda sequence: StoreBlocks(sequence, pairs, self.folder, are_states), finish)


def open_files(directory: Path, name: str, max_bytes: int) -> tuple[str, FileWatch]:
    """Create the folder of an engine's files and start to watch the directory.

    Args:
        directory: directory of all files.
        name: name of the folder; see `folder_name`.
        max_bytes: limit for all files together.

    Raises:
        StartupError: the directory cannot be used.
    """
    root = directory / f"octavo-kv-{LAYOUT_VERSION}"
    try:
        (root / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(
            f"cannot keep KV blocks in {directory}: {error.strerror} (--kv-offloading-path)",
            phase="opening the files of KV blocks",
        ) from error
    return str(root / name), FileWatch(root, root / name, max_bytes)


def folder_name(config: ResolvedConfig, plan: CachePlan, identity: str) -> str:
    """Return the name of the folder of an engine's files, in hexadecimal digits.

    Engines with the same folder name can read each other's files: they compute the same bits and use the same sharding.

    Args:
        config: the engine's configuration.
        plan: the engine's cache plan.
        identity: see `octavo.protocol.identity`.
    """
    layout = [
        identity,
        msgspec.to_builtins(config.model.hf_config),
        config.block_size,
        config.tensor_parallel_size,
        config.pipeline_parallel_size,
        msgspec.to_builtins(plan.cache_groups),
        plan.host_block_bytes,
        plan.host_state_bytes,
        msgspec.to_builtins(config.speculation),  # the draft head has its own part of each block
    ]
    return hashlib.blake2b(msgspec.json.encode(layout, order="sorted"), digest_size=16).hexdigest()
