"""`HitFinder`: finds the cached blocks from which a request can continue. Read-only."""

from collections.abc import Sequence
from typing import NamedTuple

from octavo.core_proc.cache.copy_cost import CopyCost, StatePlace
from octavo.core_proc.cache.files import FileTier
from octavo.core_proc.cache.groups import NULL_BLOCK, CacheGroups
from octavo.core_proc.cache.hashes import hash_of_block
from octavo.core_proc.cache.host_tier import HostTier
from octavo.core_proc.cache.pool import BlockPool
from octavo.core_proc.cache.states import StateSlots
from octavo.core_proc.request import Request, RequestState
from octavo.protocol.ids import BlockId


class Hits(NamedTuple):
    """Cached blocks that follow the blocks of a request."""

    num_blocks: int
    """Number of blocks per group, including blocks outside windows."""
    block_ids: Sequence[list[BlockId]]
    """Block ids per group, without blocks outside windows. `NULL_BLOCK` if a block is not on the device."""
    first_blocks: Sequence[int]
    """Index of the first block that the request will hold in each group. Empty if all groups keep every token."""
    keys: Sequence[bytes]
    """The pool keys on which this result depends."""
    state: BlockId = NULL_BLOCK
    """Slot of the state after the blocks. `NULL_BLOCK` if it is not on the device, or if the model has no states."""


NO_HITS = Hits(0, (), (), ())


class HitFinder:
    """Looks up prefixes in the blocks of the device, then of host memory, then of files.

    Args:
        pool: the blocks of all groups.
        groups: the model's cache groups.
        states: slots of recurrent states. None if the model has none.
        host: host memory tier. None if there is none.
        files: file tier. None if there is none.
        copy_cost: decides how many blocks outside the device are copied.
    """

    def __init__(
        self,
        pool: BlockPool,
        groups: CacheGroups,
        states: StateSlots | None,
        host: HostTier | None,
        files: FileTier | None,
        copy_cost: CopyCost,
    ) -> None:
        self._pool = pool
        self._groups = groups
        self._states = states
        self._host = host
        self._files = files
        self._copy_cost = copy_cost
        self._reads_files = False
        self._block_size = groups.block_size

    def find(self, request: Request) -> Hits:
        """Return the cached blocks that follow the request's own blocks. If blocks must be copied to the device, stop
        where computing is faster. Return no hits unless the request's own blocks are full.

        Every group must have the blocks that the next token reads. A window needs only its latest blocks. The state
        after the hits must be cached too.
        """
        first, partial = divmod(request.num_computed_tokens, self._block_size)
        end = (len(request.token_ids) - 1) // self._block_size
        if partial or first != request.num_blocks or end <= first:
            return NO_HITS
        hits = self._find_until(request, first, end)
        while self._copy_cost.is_known and self._has_absent(hits):
            end = self._end_of_copies(request, first, hits)
            if end == first + hits.num_blocks:
                break
            keys = hits.keys  # the decision also depends on these
            hits = self._find_until(request, first, end) if end > first else NO_HITS
            hits = hits._replace(keys=[*keys, *hits.keys])
        return hits

    def _has_absent(self, hits: Hits) -> bool:
        """Return whether any of these hits must be copied to the device."""
        return self._lacks_state(hits) or any(NULL_BLOCK in block_ids for block_ids in hits.block_ids)

    def _lacks_state(self, hits: Hits) -> bool:
        return self._states is not None and hits.num_blocks > 0 and hits.state == NULL_BLOCK

    def _end_of_copies(self, request: Request, first: int, hits: Hits) -> int:
        """Return the block index at which copies of hits end and computing begins."""
        num_host, num_files = [0] * hits.num_blocks, [0] * hits.num_blocks
        suffixes = self._groups.key_suffixes
        for index, group in absent_places(first + hits.num_blocks, hits.block_ids, NULL_BLOCK):
            is_in_host = self._host is not None and request.block_hashes[index] + suffixes[group] in self._host
            (num_host if is_in_host else num_files)[index - first] += 1
        if self._states is None:
            return self._copy_cost.best_end(first, num_host, num_files)
        end = first + hits.num_blocks
        place = self._place_of_state(request, hits)
        if self._copy_cost.is_worth_it(first, num_host, num_files, state=place):
            return end
        # This takes few iterations: each one goes back to the last checkpoint on the device, but at most halfway. If
        # the state after these hits is on the device, the blocks are too slow: only a checkpoint before them avoids
        # copies.
        limit = end - 1
        if place == "device":
            numbers = zip(num_host, num_files, strict=True)
            limit = next((index for index, absent in enumerate(numbers, first) if any(absent)), limit)
        return max(first + hits.num_blocks // 2, self._states.last_on_device(request, limit))

    def _place_of_state(self, request: Request, hits: Hits) -> StatePlace:
        """Return where the state after the hits is stored."""
        if self._states is None or not self._lacks_state(hits):
            return "device"
        host, key = self._states.host, self._states.key(request, request.num_blocks + hits.num_blocks)
        return "host" if host is not None and key in host else "files"

    def _find_until(self, request: Request, first: int, end: int) -> Hits:
        """Return the cached blocks from `first` up to `end` at most."""
        # Blocks are loaded from files only before a request starts, never while it runs.
        self._reads_files = self._files is not None and request.state is RequestState.WAITING
        keys: list[bytes] = []
        # A running request needs hits in all groups at once. Otherwise each step would search its complete prompt.
        groups = range(self._groups.num_groups) if first else self._groups.full
        block_ids = self._leading_hits(request, first, end, groups, keys)
        if not self._groups.windowed and self._states is None:
            return Hits(len(block_ids[0]), block_ids, (), keys)
        end = first + len(block_ids[0]) if block_ids else end
        end = self._common_end(request, first, end, keys)
        starts = [first] * self._groups.num_groups
        for group in self._groups.windowed:
            starts[group.index] = max(first, group.first_block(end * self._block_size))
        found = [
            [self._find_cached(request.block_hashes[index] + suffix) for index in range(start, end)]
            for start, suffix in zip(starts, self._groups.key_suffixes, strict=True)
        ]
        slot = NULL_BLOCK
        if self._states is not None and end > first:
            slot = self._states.checkpoint(request, end)
        return Hits(end - first, found, starts if self._groups.windowed else (), keys, slot)

    def _find(self, key: bytes) -> BlockId | None:
        """Return the block with this key. Return `NULL_BLOCK` if it is not on the device, None if it is not cached."""
        block_id = self._pool.find(key)
        if block_id is None:
            if self._host is not None and key in self._host:
                return NULL_BLOCK
            if self._reads_files and self._files is not None and key in self._files:
                return NULL_BLOCK
        return block_id

    def _find_cached(self, key: bytes) -> BlockId:
        block_id = self._find(key)
        assert block_id is not None, "a hit was lost while it was looked up"
        return block_id

    def _leading_hits(
        self, request: Request, first: int, end: int, groups: Sequence[int], keys: list[bytes]
    ) -> list[list[BlockId]]:
        """Return the leading blocks from `first` up to `end` at most that all of these groups have.

        Adds the looked-up keys to `keys`.
        """
        if len(groups) == 1:  # perf: most models have one group
            block_ids, suffix = [], self._groups.key_suffixes[groups[0]]
            for index in range(first, end):
                keys.append(self._hash(request, index) + suffix)
                if (block_id := self._find(keys[-1])) is None:
                    break
                block_ids.append(block_id)
            return [block_ids]
        found: list[list[BlockId]] = [[] for _ in groups]
        suffixes = [self._groups.key_suffixes[group] for group in groups]
        for index in range(first, end if groups else first):
            block_hash = self._hash(request, index)
            for suffix, block_ids in zip(suffixes, found, strict=True):
                keys.append(key := block_hash + suffix)
                if (block_id := self._find(key)) is None:
                    return [block_ids[: index - first] for block_ids in found]
                block_ids.append(block_id)
        return found

    def _end_within_windows(self, request: Request, end: int, keys: list[bytes]) -> int:
        """Return the largest number of leading blocks, at most `end`, after which each window is cached. Adds to
        `keys`."""
        is_settled = False
        while not is_settled:
            is_settled = True
            for group in self._groups.windowed:
                index, first = end, group.first_block(end * self._block_size)
                while index > first:
                    index -= 1
                    keys.append(self._hash(request, index) + self._groups.key_suffixes[group.index])
                    if self._find(keys[-1]) is None:
                        # No window that ends after this block is complete.
                        end, first, is_settled = index, group.first_block(index * self._block_size), False
        return end

    def _common_end(self, request: Request, first: int, end: int, keys: list[bytes]) -> int:
        """Return the largest number of leading blocks, at most `end`, after which windows and the state are cached.

        Adds the looked-up keys to `keys`.
        """
        if first:
            return end if self._states is None else self._states.last_of_next_checkpoints(request, first, end, keys)
        while True:
            end = self._end_within_windows(request, end, keys)
            if self._states is None:
                return end
            checkpoint = self._states.last_checkpoint(request, end, keys, self._files if self._reads_files else None)
            if checkpoint == end:
                return end
            end = checkpoint

    def _hash(self, request: Request, index: int) -> bytes:
        return hash_of_block(request, index, self._block_size)


def absent_places(num_blocks: int, block_ids: Sequence[list[BlockId]], absent: BlockId) -> list[tuple[int, int]]:
    """Return index and group of the hit blocks that are not on the device.

    Args:
        num_blocks: number of blocks of the request, including the hits.
        block_ids: block ids of the hits per group, which end at `num_blocks`.
        absent: the id that marks blocks that are not on the device.
    """
    return [
        (num_blocks - len(found) + place, group)
        for group, found in enumerate(block_ids)
        for place, block_id in enumerate(found)
        if block_id == absent
    ]
