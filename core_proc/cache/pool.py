"""The KV blocks: reference counts, keys of their contents, and the free list.

Knows no requests and no tokens.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Protocol

from octavo.protocol.ids import BlockId

_NOWHERE = -1


class OutOfBlocks(Exception):
    """No block is free: the scheduler has miscounted."""


class ContentObserver(Protocol):
    """Observes which contents can no longer be found."""

    def on_removed(self, block_hash: bytes) -> None:
        """The block with this key was removed: a block hash, plus the group suffix that `PrefixCache` appends."""

    def on_cleared(self) -> None:
        """All contents were removed."""


class BlockPool:
    """All KV blocks of the engine.

    A free block may still hold useful contents: it keeps its hash until it is allocated again. Free blocks form a
    doubly linked list over the block ids, allocated from the head: blocks without a hash first, then the least recently
    freed. Every operation is O(1) per block.

    Invariant: a block is in the free list exactly if its reference count is 0.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, BlockId] = {}
        self.observers: list[ContentObserver] = []
        self.on_evicted: Callable[[BlockId, bytes], None] | None = None
        """Called with a block that loses its contents to another owner, and its hash. None if nobody needs it."""
        self._watched: Set[bytes] = frozenset()
        self.has_watched_changed = False
        """True after a watched hash was added or removed, or its block became free or used."""
        # The sentinel of the list has the index after the last block. Its next is the head, its previous the tail.
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._previous: list[int] = [num_blocks, *range(num_blocks)]

    def watch(self, block_hashes: Set[bytes]) -> None:
        """Watch only these hashes from now on; see `has_watched_changed`."""
        self._watched = block_hashes
        self.has_watched_changed = False

    def find(self, block_hash: bytes) -> BlockId | None:
        """Return the block with this hash. Return None if there is none."""
        return self._by_hash.get(block_hash)

    def find_cached(self, block_hash: bytes) -> BlockId:
        """Return the block with this hash, which must be cached."""
        return self._by_hash[block_hash]

    def is_free(self, block_id: BlockId) -> bool:
        """Return whether no request holds the block."""
        return self._references[block_id] == 0

    def num_references(self, block_id: BlockId) -> int:
        """Return how many requests hold the block."""
        return self._references[block_id]

    def block_hash(self, block_id: BlockId) -> bytes | None:
        """Return the hash of the block's contents. Return None if it has none."""
        return self._hashes[block_id]

    def incref(self, block_id: BlockId) -> None:
        """Add a reference to a block found by its hash, and remove it from the free list if it is there."""
        if self._references[block_id] == 0:
            self._unlink(block_id)
            self.has_watched_changed |= self._hashes[block_id] in self._watched
        self._references[block_id] += 1

    def allocate(self, *, keeps_evicted: bool = True) -> BlockId:
        """Return a free block with one reference. Its previous contents are removed from the cache.

        Args:
            keeps_evicted: whether `on_evicted` is called. False if the block is overwritten before the next step.

        Raises:
            OutOfBlocks: no block is free.
        """
        if self.num_free == 0:
            raise OutOfBlocks("no block is free")
        block_id: BlockId = self._next[self.num_blocks]
        self._unlink(block_id)
        self._references[block_id] = 1
        if (old_hash := self._hashes[block_id]) is not None:
            del self._by_hash[old_hash]
            self._hashes[block_id] = None
            self.has_watched_changed |= old_hash in self._watched
            if self.on_evicted is not None and keeps_evicted:
                self.on_evicted(block_id, old_hash)
            for observer in self.observers:
                observer.on_removed(old_hash)
        return block_id

    def set_hash(self, block_id: BlockId, block_hash: bytes) -> bool:
        """Set the hash of an allocated block. Return whether the block can be found by it now.

        If another block already has the same hash, this block gets none: block ids sent to workers never change, so
        duplicates are not merged.
        """
        if self._hashes[block_id] is not None or block_hash in self._by_hash:
            return False
        self._hashes[block_id] = block_hash
        self._by_hash[block_hash] = block_id
        self.has_watched_changed |= block_hash in self._watched
        return True

    def drop_hash(self, block_hash: bytes) -> None:
        """Remove this hash from the cache. Requests that hold its block keep the block."""
        if (block_id := self._by_hash.pop(block_hash, None)) is not None:
            self._hashes[block_id] = None
            self.has_watched_changed |= block_hash in self._watched
            for observer in self.observers:
                observer.on_removed(block_hash)

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Drop one reference of each block of a sequence, given from its head to its tail.

        The tail is freed first, so that it is evicted first: shorter prefixes serve more requests.
        """
        for block_id in reversed(block_ids):
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                block_hash = self._hashes[block_id]
                self._link(block_id, before=self._next[self.num_blocks] if block_hash is None else self.num_blocks)
                self.has_watched_changed |= block_hash in self._watched

    def reset_contents(self) -> bool:
        """Remove the contents of all blocks from the cache. Return False and do nothing if any block is in use."""
        if self.num_free != self.num_blocks:
            return False
        self.forget_contents()
        return True

    def forget_contents(self) -> None:
        """Remove the contents of all blocks from the cache. Requests that hold blocks keep them."""
        self._hashes = [None] * self.num_blocks
        self._by_hash.clear()
        self.has_watched_changed = True
        for observer in self.observers:
            observer.on_cleared()

    def free_blocks(self) -> Iterator[BlockId]:
        """Yield the free blocks in the order in which they would be reused."""
        block_id = self._next[self.num_blocks]
        while block_id != self.num_blocks:
            yield block_id
            block_id = self._next[block_id]

    def cached_hashes(self) -> list[bytes]:
        """Return the hashes of all cached contents."""
        return list(self._by_hash)

    def cached_blocks(self) -> dict[bytes, BlockId]:
        """Return a copy of the map from hash to block."""
        return dict(self._by_hash)

    def _unlink(self, block_id: BlockId) -> None:
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before] = after
        self._previous[after] = before
        self._next[block_id] = self._previous[block_id] = _NOWHERE
        self.num_free -= 1

    def _link(self, block_id: BlockId, before: int) -> None:
        previous = self._previous[before]
        self._next[previous] = self._previous[before] = block_id
        self._previous[block_id] = previous
        self._next[block_id] = before
        self.num_free += 1
