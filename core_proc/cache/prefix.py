"""The prefix cache, and with it all block keeping of requests: give, share, name, take back.

Decides nothing about who gets blocks: the scheduler counts before it asks.
"""

from octavo.core_proc.cache.hashing import chain_hash, root_hash
from octavo.core_proc.cache.pool import BlockPool
from octavo.core_proc.request import Request


class PrefixCache:
    """Blocks of requests, shared where their contents are equal.

    Invariant: a block is named only when its tokens are known and its KV is computed by a plan that
    was made before, or is the one being made: workers execute plans in order and write KV before they
    read it, so whoever finds the block may read it.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, is_enabled: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self.is_enabled = is_enabled

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, request: Request, num_tokens: int) -> int:
        """Return how many more blocks the request needs to hold `num_tokens` tokens."""
        return max(0, self.num_blocks_for(num_tokens) - len(request.block_ids))

    def count_hits(self, request: Request) -> tuple[int, int]:
        """Return how many blocks `share` would find now, and how many of those are free. Changes nothing."""
        num_hits = num_free = 0
        for block_id in self._hits(request):
            num_hits += 1
            num_free += self.pool.is_free(block_id)
        return num_hits, num_free

    def share(self, request: Request) -> int:
        """Take the cached blocks that continue what the request has computed.

        At least one token is always left to compute: its logits are needed.

        Returns:
            The number of tokens that need not be computed.
        """
        found = self._hits(request)
        for block_id in found:
            self.pool.hold(block_id)
        request.block_ids += found
        num_tokens = len(found) * self.block_size
        request.num_computed_tokens += num_tokens
        return num_tokens

    def extend(self, request: Request, num_tokens: int) -> None:
        """Give the request blocks to hold `num_tokens` tokens.

        Raises:
            OutOfBlocks: not enough are free.
        """
        for _ in range(self.num_missing_blocks(request, num_tokens)):
            request.block_ids.append(self.pool.take())

    def name_blocks(self, request: Request) -> None:
        """Name the request's full blocks whose tokens are known and computed."""
        if not self.is_enabled:
            return
        num_full = min(request.num_computed_tokens, len(request.token_ids)) // self.block_size
        first = request.num_named_blocks
        for index in range(first, num_full):
            self.pool.name(request.block_ids[index], self._hash(request, index))
        request.num_named_blocks = max(first, num_full)

    def distrust(self, request: Request) -> None:
        """Let nobody find what the request has computed or shared: values in it are not numbers.

        They may be so in front of the token that brought them in. A weight of zero does not make zero of NaN, so later
        layers store NaN for earlier positions of the same step, whose blocks other prompts would find.
        """
        for block_hash in request.block_hashes:
            self.pool.forget(block_hash)
        request.num_named_blocks = len(request.block_ids)  # what is left unnamed stays so

    def release(self, request: Request) -> None:
        """Take all blocks back; what they hold stays to be found until they are needed."""
        self.name_blocks(request)
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_named_blocks = 0
        request.num_computed_tokens = 0

    def _hits(self, request: Request) -> list[int]:
        """Return the cached blocks that follow the request's own, [] unless those are all full."""
        found: list[int] = []
        if not self.is_enabled or request.sampling.skip_reading_prefix_cache:
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
        """Return the name of the request's block `index`, whose tokens must be known."""
        hashes, size = request.block_hashes, self.block_size
        while len(hashes) <= index:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else root_hash(request.cache_salt, request.adapter)
            hashes.append(chain_hash(parent, request.token_ids[start : start + size]))
        return hashes[index]
