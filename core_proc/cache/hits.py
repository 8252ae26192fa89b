"""`HitFinder`: which cached blocks a request can continue from. Changes nothing."""

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
    """Cached blocks that follow those of a request."""

    num_blocks: int
    """Of each group, with those that its window has passed."""
    block_ids: Sequence[list[BlockId]]
    """Of each group, without those that its window has passed; `NULL_BLOCK` for one that is elsewhere."""
    first_blocks: Sequence[int]
    """The index of the first block that the request then holds in each group; () if all groups keep every token."""
    keys: Sequence[bytes]
    """The keys in the pools on which the result depends."""
    state: BlockId = NULL_BLOCK
    """The slot of the state after them; `NULL_BLOCK` if it is elsewhere, or the model has none."""


NO_HITS = Hits(0, (), (), ())


class HitFinder:
    """Looks prefixes up, in the blocks of the device and then in those of the host.

    Args:
        pool: the blocks of all groups.
        groups: of the model.
        states: None: the model has no recurrent states.
        host: None: nothing is kept in host memory.
        files: None: nothing is kept in files.
        copy_cost: decides how far contents that are elsewhere are copied.
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
        """Return the cached blocks that follow the request's own, as far as copying those that are elsewhere is faster
        than computing them; none unless its own are all full.

        Every group must have the blocks that the next token reads. A window reaches back to the last of them only, and
        the state after them must be there.
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
            keys = hits.keys  # on which the decision depends too
            hits = self._find_until(request, first, end) if end > first else NO_HITS
            hits = hits._replace(keys=[*keys, *hits.keys])
        return hits

    def _has_absent(self, hits: Hits) -> bool:
        """Return whether anything of these hits must be copied to the device."""
        return self._lacks_state(hits) or any(NULL_BLOCK in block_ids for block_ids in hits.block_ids)

    def _lacks_state(self, hits: Hits) -> bool:
        return self._states is not None and hits.num_blocks > 0 and hits.state == NULL_BLOCK

    def _end_of_copies(self, request: Request, first: int, hits: Hits) -> int:
        """Return at which block copies of hits end, and the rest is computed."""
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
        # Few tries: at most to the last checkpoint before the middle, but past none on the device. If the state after
        # these hits is there too, blocks are too slow, and only a checkpoint before them needs no copies.
        limit = end - 1
        if place == "device":
            numbers = zip(num_host, num_files, strict=True)
            limit = next((index for index, absent in enumerate(numbers, first) if any(absent)), limit)
        return max(first + hits.num_blocks // 2, self._states.last_on_device(request, limit))

    def _place_of_state(self, request: Request, hits: Hits) -> StatePlace:
        """Return from where the state after hits must come."""
        if self._states is None or not self._lacks_state(hits):
            return "device"
        host, key = self._states.host, self._states.key(request, request.num_blocks + hits.num_blocks)
        return "host" if host is not None and key in host else "files"

    def _find_until(self, request: Request, first: int, end: int) -> Hits:
        """Return the cached blocks from `first` on, at most up to `end`."""
        # Contents of files are loaded before a request starts, never for one that runs.
        self._reads_files = self._files is not None and request.state is RequestState.WAITING
        keys: list[bytes] = []
        # A request that has begun needs hits in all groups at once, or each step would search its whole prompt.
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
        """Return the block with a content, `NULL_BLOCK` if it is elsewhere, None if nobody has it."""
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
        """Return the blocks of each of these groups from `first` on, at most to `end`, as long as all have one.

        The keys that were looked up are added to `keys`.
        """
        if len(groups) == 1:  # perf: as in most models
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
        """Return the most leading blocks, at most `end`, at whose end each window is cached; adds to `keys`."""
        is_settled = False
        while not is_settled:
            is_settled = True
            for group in self._groups.windowed:
                index, first = end, group.first_block(end * self._block_size)
                while index > first:
                    index -= 1
                    keys.append(self._hash(request, index) + self._groups.key_suffixes[group.index])
                    if self._find(keys[-1]) is None:
                        # No window that ends after this block is whole.
                        end, first, is_settled = index, group.first_block(index * self._block_size), False
        return end

    def _common_end(self, request: Request, first: int, end: int, keys: list[bytes]) -> int:
        """Return the most leading blocks, at most `end`, at whose end windows and the state are cached.

        The keys that were looked up are added to `keys`.
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
    """Return index and group of the blocks among hits that are not on the device.

    Args:
        num_blocks: of the request, with these hits.
        block_ids: of each group, those of the hits, which end there.
        absent: stands for such a block.
    """
    return [
        (num_blocks - len(found) + place, group)
        for group, found in enumerate(block_ids)
        for place, block_id in enumerate(found)
        if block_id == absent
    ]
