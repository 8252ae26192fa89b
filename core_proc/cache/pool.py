"""The KV blocks: reference counts, contents by hash, and the order in which free blocks are reused.

Knows no requests and no tokens.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Protocol

from octavo.protocol.ids import BlockId

_NOWHERE = -1


class OutOfBlocks(Exception):
    """No block was free: the scheduler has miscounted."""


class ContentObserver(Protocol):
    """Learns which contents can no longer be found."""

    def on_removed(self, block_hash: bytes) -> None:
        """The block with this content is gone, which `PrefixCache` has extended by the suffix of its group."""

    def on_cleared(self) -> None:
        """All contents are gone."""


class BlockPool:
    """All KV blocks of the engine.

    A free block may still hold useful content: it keeps its hash until it is allocated again. Free blocks form a
    doubly linked list over the block ids, allocated from the head: blocks without a hash first, then the least recently
    freed. Every operation is O(1) per block.

    Invariant: a block is in the free list exactly when its reference count is 0.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, BlockId] = {}
        self.observers: list[ContentObserver] = []
        self.on_evicted: Callable[[BlockId, bytes], None] | None = None
        """Called with a block that loses its content to another owner, and its hash."""
        self._watched: Set[bytes] = frozenset()
        self.has_watched_changed = False
        """True once a watched hash was added or dropped, or its block became free or used."""
        # The list's sentinel has the index after the last block; its next is the head, its previous the tail.
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._previous: list[int] = [num_blocks, *range(num_blocks)]

    def watch(self, block_hashes: Set[bytes]) -> None:
        """Watch these hashes, and no others from now on: see `has_watched_changed`."""
        self._watched = block_hashes
        self.has_watched_changed = False

    def find(self, block_hash: bytes) -> BlockId | None:
        """Return the block with this content, None when there is none."""
        return self._by_hash.get(block_hash)

    def find_cached(self, block_hash: bytes) -> BlockId:
        """Return the block with this content, which must be cached."""
        return self._by_hash[block_hash]

    def is_free(self, block_id: BlockId) -> bool:
        """True when no request holds the block."""
        return self._references[block_id] == 0

    def num_references(self, block_id: BlockId) -> int:
        """Return how many requests hold the block."""
        return self._references[block_id]

    def block_hash(self, block_id: BlockId) -> bytes | None:
        """Return the hash of the block's content, None when it has none."""
        return self._hashes[block_id]

    def incref(self, block_id: BlockId) -> None:
        """Add a reference to a block found by its hash, taking it off the free list if it was there."""
        if self._references[block_id] == 0:
            self._unlink(block_id)
            self.has_watched_changed |= self._hashes[block_id] in self._watched
        self._references[block_id] += 1

    def allocate(self, *, keeps_evicted: bool = True) -> BlockId:
        """Return a free block with one reference. Its earlier content is dropped from the cache.

        Args:
            keeps_evicted: whether `on_evicted` is called; not if something else is written before the next step.

        Raises:
            OutOfBlocks: none is free.
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
        """Record the content of an allocated block. Returns whether the block can be found by it now.

        When another block already has the same content this one gets no hash: block ids that a
        worker was given never change, so duplicates are not merged.
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

        The tail is freed first, so that it is evicted first: the shorter a prefix, the more requests can use it.
        """
        for block_id in reversed(block_ids):
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                block_hash = self._hashes[block_id]
                self._link(block_id, before=self._next[self.num_blocks] if block_hash is None else self.num_blocks)
                self.has_watched_changed |= block_hash in self._watched

    def reset_contents(self) -> bool:
        """Drop the contents of all blocks from the cache; rejected (False) while any block is in use."""
        if self.num_free != self.num_blocks:
            return False
        self.forget_contents()
        return True

    def forget_contents(self) -> None:
        """Drop the contents of all blocks from the cache. Requests that hold blocks keep them."""
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
        """Return the hashes of all contents."""
        return list(self._by_hash)

    def cached_blocks(self) -> dict[bytes, BlockId]:
        """Return a copy of the map from content to block."""
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
