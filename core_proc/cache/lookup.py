"""`PrefixLookup`: finds what waiting requests can continue from, and what must be copied to the device for that."""

from collections.abc import Sequence
from typing import NamedTuple

from octavo.core_proc.cache.copy_cost import CopyCost
from octavo.core_proc.cache.files import FileTier
from octavo.core_proc.cache.groups import NULL_BLOCK, CacheGroups
from octavo.core_proc.cache.hits import NO_HITS, HitFinder, Hits, absent_places
from octavo.core_proc.cache.host_tier import HostTier
from octavo.core_proc.cache.pool import BlockPool
from octavo.core_proc.cache.states import StateSlots
from octavo.core_proc.request import Request
from octavo.protocol.ids import BlockId


class AbsentContents(NamedTuple):
    """Hits of a waiting request that are not on the device."""

    places: list[tuple[int, int]]
    """Index and group of each block."""
    keys: list[bytes]
    """Keys of these blocks."""
    state_key: bytes
    """Key of the state after them. Empty if it is on the device or the model has none."""


class PrefixLookup:
    """Finds hits. Caches those of the request counted last, until anything changes on which they depend.

    Args:
        pool: the blocks of all groups.
        groups: the model's cache groups.
        states: slots of recurrent states. None if the model has none.
        host: host memory tier. None if there is none.
        files: file tier. None if there is none.
        copy_cost: decides how many blocks outside the device are copied.
        is_enabled: if False, nothing is ever found.
    """

    def __init__(
        self,
        pool: BlockPool,
        groups: CacheGroups,
        states: StateSlots | None,
        host: HostTier | None,
        files: FileTier | None,
        copy_cost: CopyCost,
        *,
        is_enabled: bool,
    ) -> None:
        self._pool = pool
        self._key_suffixes = groups.key_suffixes
        self._states, self._host, self._files = states, host, files
        self._host_states = None if states is None else states.host
        self._copy_cost = copy_cost
        self._is_enabled = is_enabled
        self._finder = HitFinder(pool, groups, states, host, files, copy_cost)
        places = (pool, None if states is None else states.pool, host, self._host_states, files)
        self._places = [place for place in places if place is not None]
        """Pools and tiers that are watched for changes of the looked-up keys."""
        self._counted: tuple[Request, int] | None = None
        """The request whose hits were counted last, with its number of tokens at that time."""
        self._counts: tuple[Hits, list[int]] = (NO_HITS, [])

    def find(self, request: Request) -> Hits:
        """Return the cached blocks that follow the request's own blocks."""
        # perf: a starting request was counted just before
        if not request.num_blocks and self._is_counted(request):
            return self._counts[0]
        return self._find(request)

    def count(self, request: Request) -> tuple[Hits, list[int]]:
        """Return the hits of a request without blocks, and how many free blocks they occupy per group."""
        if self._is_counted(request):
            return self._counts
        hits = self._find(request)
        keys = frozenset(hits.keys)
        for place in self._places:
            place.watch(keys)
        self._copy_cost.has_changed = False
        self._counted = request, len(request.token_ids)
        self._counts = hits, [sum(map(self._takes_free_block, block_ids)) for block_ids in hits.block_ids]
        return self._counts

    def num_absent_blocks(self, request: Request) -> int:
        """Return how many blocks must be copied to the device before a waiting request can continue from them."""
        return sum([block_ids.count(NULL_BLOCK) for block_ids in self.count(request)[0].block_ids])

    def absent(self, request: Request) -> AbsentContents:
        """Return the hits of a waiting request that are not on the device."""
        hits, state_key = self.count(request)[0], b""
        places = absent_places(hits.num_blocks, hits.block_ids, NULL_BLOCK)
        if self._states is not None and hits.num_blocks and hits.state == NULL_BLOCK:
            state_key = self._states.key(request, hits.num_blocks)
        return AbsentContents(places, self.keys(request, places), state_key)

    def has_file_hits(self, request: Request) -> bool:
        """Return whether a waiting request can continue from blocks that only files have."""
        if self._files is None:
            return False
        absent, files = self.absent(request), self._files
        if any(key in files and (self._host is None or key not in self._host) for key in absent.keys):
            return True
        return bool(absent.state_key) and (self._host_states is None or absent.state_key not in self._host_states)

    def keys(self, request: Request, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the keys of blocks of a request, given by index and group."""
        return [request.block_hashes[index] + self._key_suffixes[group] for index, group in places]

    def _find(self, request: Request) -> Hits:
        if not self._is_enabled or not request.reads_prefix_cache or request.is_mixed:
            return NO_HITS
        return self._finder.find(request)

    def _is_counted(self, request: Request) -> bool:
        """Return whether the last result of `count` was for this request and is still valid."""
        # perf: the first waiting request is checked in every step
        if self._copy_cost.has_changed or self._counted != (request, len(request.token_ids)):
            return False
        return not any(place.has_watched_changed for place in self._places)

    def _takes_free_block(self, block_id: BlockId) -> bool:
        return block_id == NULL_BLOCK or self._pool.is_free(block_id)
