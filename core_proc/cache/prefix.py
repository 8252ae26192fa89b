"""The prefix cache. It does all block bookkeeping for requests: allocate, share, hash, free.

The scheduler decides who gets blocks, and counts them before it asks.
"""

import math

from octavo.core_proc.cache.hashing import ROOT_HASH, hash_block
from octavo.core_proc.cache.pool import BlockPool
from octavo.core_proc.request import NO_LIST, Request


class PrefixCache:
    """Blocks of requests, shared where their contents are equal.

    Invariant: a block has a hash only if its tokens are known and its KV is computed by an earlier plan or by the one
    being made. Workers execute plans in order and write KV before they read it, so the block can be read at once.

    All KV cache groups are of the kind "full": each needs a block for the same tokens at the same time, and has as many
    blocks as the others. One pool serves them all, and a block id stands for one block in the tensors of each group. A
    group of another kind, which frees blocks earlier, will have a pool and lists of its own here.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, is_enabled: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self.is_enabled = is_enabled
        self._counted: tuple[Request, int] | None = None
        """The request whose hits were counted last, with the number of its tokens then."""
        self._counts = (0, 0)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, request: Request, num_tokens: int) -> int:
        """Return how many more blocks the request needs to hold `num_tokens` tokens."""
        return max(0, self.num_blocks_for(num_tokens) - len(request.block_ids))

    def count_hits(self, request: Request) -> tuple[int, int]:
        """Return how many blocks `attach_hits` would find now, and how many of those are free. Changes nothing."""
        # perf: the first waiting request is checked in every step. The answer is valid until one of its blocks changes.
        what = (request, len(request.token_ids))
        if self._counted == what and not self.pool.has_watched_changed:
            return self._counts
        found = self._hits(request)
        first = request.num_computed_tokens // self.block_size
        self.pool.watch(frozenset(request.block_hashes[first : first + len(found) + 1]))
        self._counted = what
        self._counts = len(found), sum(map(self.pool.is_free, found))
        return self._counts

    def attach_hits(self, request: Request) -> int:
        """Attach the cached blocks that follow the request's own.

        At least one token is left to compute, because its logits are needed.

        Returns:
            The number of tokens that need not be computed.
        """
        found = self._hits(request)
        for block_id in found:
            self.pool.incref(block_id)
        if request.block_ids:
            request.block_ids += found
        else:
            request.block_ids = found
        num_tokens = len(found) * self.block_size
        request.num_computed_tokens += num_tokens
        return num_tokens

    def extend(self, request: Request, num_tokens: int) -> None:
        """Allocate blocks so that the request can hold `num_tokens` tokens.

        Raises:
            OutOfBlocks: not enough are free.
        """
        for _ in range(self.num_missing_blocks(request, num_tokens)):
            request.block_ids.append(self.pool.allocate())

    def cache_full_blocks(self, request: Request) -> None:
        """Set the hashes of the request's full blocks whose tokens are known and computed."""
        if not self.is_enabled:
            return
        num_full = min(request.num_computed_tokens, len(request.token_ids)) // self.block_size
        first = request.num_hashed_blocks
        for index in range(first, num_full):
            self.pool.set_hash(request.block_ids[index], self._hash(request, index))
        request.num_hashed_blocks = max(first, num_full)

    def has_unhashed_block(self, request: Request) -> bool:
        """Return whether `cache_full_blocks` has something to do as soon as the request's known tokens are computed."""
        return self.is_enabled and len(request.token_ids) // self.block_size > request.num_hashed_blocks

    def next_hash_length(self, request: Request) -> float:
        """Return how many known tokens the request must have before another block can be hashed."""
        return (len(request.token_ids) // self.block_size + 1) * self.block_size if self.is_enabled else math.inf

    def invalidate_blocks(self, request: Request) -> None:
        """Remove everything the request has computed or shared from the cache: it may contain NaN.

        Earlier positions are affected too: a weight of zero does not turn NaN into zero, so later layers store NaN for
        all positions of the step.
        """
        for block_hash in request.block_hashes:
            self.pool.drop_hash(block_hash)
        request.num_hashed_blocks = len(request.block_ids)  # a block without a hash never gets one

    def release(self, request: Request) -> None:
        """Free all blocks. Their contents stay in the cache until the blocks are allocated again."""
        self.cache_full_blocks(request)
        self.pool.release(request.block_ids)
        request.block_ids = NO_LIST
        request.num_hashed_blocks = 0
        request.num_computed_tokens = 0

    def _hits(self, request: Request) -> list[int]:
        """Return the cached blocks that follow the request's own; [] unless its own are all full."""
        found: list[int] = []
        if not self.is_enabled or not request.reads_prefix_cache:
            return found
        first, partial = divmod(request.num_computed_tokens, self.block_size)
        if partial or first != len(request.block_ids):
            return found
        for index in range(first, (len(request.token_ids) - 1) // self.block_size):
            block_id = self.pool.find(self._hash(request, index))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def _hash(self, request: Request, index: int) -> bytes:
        """Return the hash of the request's block `index`, whose tokens must be known."""
        hashes = request.block_hashes = request.block_hashes or []
        size = self.block_size
        while len(hashes) <= index:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else ROOT_HASH
            hashes.append(hash_block(parent, request.token_ids[start : start + size], start, request.extra_keys))
        return hashes[index]
