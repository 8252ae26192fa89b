"""The KV blocks: reference counts, contents by hash, and the order in which free blocks are reused.

Knows nothing of requests or tokens.
"""

from collections.abc import Iterator, Sequence

from octavo.protocol.ids import BlockId

_NOWHERE = -1


class OutOfBlocks(Exception):
    """More blocks were taken than are free: the scheduler did not count."""


class BlockPool:
    """All KV blocks of the engine.

    A free block may still hold useful content: it keeps its hash until it is taken for something
    else. Free blocks form a doubly linked list over the block ids, reused from the head: blocks
    without content first, then the least recently freed. Every operation is O(1) per block.

    Invariant: a block is in the free list exactly when its reference count is 0.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, BlockId] = {}
        # The list's sentinel has the index after the last block; its next is the head, its previous the tail.
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._previous: list[int] = [num_blocks, *range(num_blocks)]

    def find(self, block_hash: bytes) -> BlockId | None:
        """Return the block with this content, None when there is none."""
        return self._by_hash.get(block_hash)

    def is_free(self, block_id: BlockId) -> bool:
        """True when nobody holds the block."""
        return self._references[block_id] == 0

    def num_references(self, block_id: BlockId) -> int:
        """Return how many requests hold the block."""
        return self._references[block_id]

    def block_hash(self, block_id: BlockId) -> bytes | None:
        """Return the name of the block's content, None when it has none."""
        return self._hashes[block_id]

    def hold(self, block_id: BlockId) -> None:
        """Add a reference to a block found by its hash, taking it off the free list if it was there."""
        if self._references[block_id] == 0:
            self._unlink(block_id)
        self._references[block_id] += 1

    def take(self) -> BlockId:
        """Return a free block with one reference; what it held before is forgotten.

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
        return block_id

    def name(self, block_id: BlockId, block_hash: bytes) -> None:
        """Record the content of a held block.

        When another block already has the same content this one stays unnamed: block ids that a
        worker was given never change, so duplicates are not merged.
        """
        if self._hashes[block_id] is None and block_hash not in self._by_hash:
            self._hashes[block_id] = block_hash
            self._by_hash[block_hash] = block_id

    def forget(self, block_hash: bytes) -> None:
        """Let no block be found under this name any more; who holds the block keeps it."""
        if (block_id := self._by_hash.pop(block_hash, None)) is not None:
            self._hashes[block_id] = None

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Drop one reference of each block of a sequence, given from its head to its tail.

        The tail is freed first, so that it is also reused first: a prefix is worth more the shorter it is.
        """
        for block_id in reversed(block_ids):
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                at_head = self._hashes[block_id] is None
                self._link(block_id, before=self._next[self.num_blocks] if at_head else self.num_blocks)

    def forget_contents(self) -> bool:
        """Forget what all blocks hold; refused (False) while any block is in use."""
        if self.num_free != self.num_blocks:
            return False
        self._hashes = [None] * self.num_blocks
        self._by_hash.clear()
        return True

    def free_blocks(self) -> Iterator[BlockId]:
        """Yield the free blocks in the order in which they would be reused."""
        block_id = self._next[self.num_blocks]
        while block_id != self.num_blocks:
            yield block_id
            block_id = self._next[block_id]

    def named_blocks(self) -> dict[bytes, BlockId]:
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
