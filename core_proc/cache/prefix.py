"""The prefix cache: all block bookkeeping for requests, i.e. allocation, sharing, hashing and freeing.

The scheduler decides which request gets blocks, and counts free blocks beforehand.
"""

import math
from collections.abc import Collection, Sequence
from typing import Protocol

from octavo.core_proc.cache.copy_cost import CopyCost
from octavo.core_proc.cache.files import FileTier
from octavo.core_proc.cache.groups import NULL_BLOCK, CacheGroups
from octavo.core_proc.cache.hashes import hash_of_block
from octavo.core_proc.cache.hits import Hits, absent_places
from octavo.core_proc.cache.host_tier import HostTier
from octavo.core_proc.cache.loads import BlockLoads
from octavo.core_proc.cache.lookup import PrefixLookup
from octavo.core_proc.cache.pool import BlockPool, ContentObserver
from octavo.core_proc.cache.states import StateSlots
from octavo.core_proc.request import NO_LIST, Request, RequestState
from octavo.protocol.ids import BlockId
from octavo.protocol.steps import BlockCopy


class CacheObserver(ContentObserver, Protocol):
    """Observes every change of what can be found in the prefix cache."""

    def on_stored(self, request: Request, index: int, group: int) -> None:
        """Block `index` of the request in a group can be found from now on.

        Its key in the pool is `request.block_hashes[index] + key_suffixes[group]`.
        """


class PrefixCache:
    """The blocks of requests, shared if their contents are equal.

    Invariant: a block has a hash only if its tokens are known and its KV is computed by an earlier plan or by the
    current one. Workers execute plans in order and write KV before they read it, so the block can be used at once.

    One pool serves all KV cache groups: blocks of all groups have the same size in bytes, and a block belongs to one
    group at a time. A request's lists have the same length in all groups. States have separate slots: see `StateSlots`.

    Blocks outside windows are freed between two plans. Steps in flight may still read them, but workers execute these
    before the step in which the next owner writes.

    If there is a host tier, evicted contents stay there and are copied in for a request that can continue from them.
    Workers copy before the step, so the invariant holds for these blocks too.
    """

    def __init__(
        self,
        pool: BlockPool,
        groups: CacheGroups,
        *,
        num_states: int = 0,
        num_host_blocks: int = 0,
        num_host_states: int = 0,
        offloads: bool = False,
        has_files: bool = False,
        host_block_s: float = 0.0,
        host_state_s: float = 0.0,
        is_enabled: bool,
    ) -> None:
        self.pool = pool
        self.groups = groups
        self.num_groups = groups.num_groups
        self.states = None
        """Slots of recurrent states. None if the model has none."""
        if groups.state is not None:
            suffix = bytes([self.num_groups])
            self.states = StateSlots(groups.state, num_states, suffix, num_host_states, offloads=offloads)
        self.host = HostTier(num_host_blocks) if num_host_blocks and is_enabled else None
        """Host memory tier of blocks. None if there is none."""
        tiers = (self.host, None if self.states is None else self.states.host)
        self.host_tiers = [tier for tier in tiers if tier is not None]
        """The host tiers of blocks and of states, as far as they exist."""
        if self.host is not None:
            pool.on_evicted = self.host.on_evicted
        self.files = FileTier() if has_files and is_enabled else None
        """File tier. None if nothing is kept in files."""
        self.loads = BlockLoads(pool, self.host, self.files, None if self.states is None else self.states.host)
        self.copy_cost = CopyCost(host_block_s, groups.block_size, host_state_s)
        """Decides whether hits outside the device are worth copying."""
        self.lookup = PrefixLookup(
            pool, groups, self.states, self.host, self.files, self.copy_cost, is_enabled=is_enabled
        )
        self.num_loaded_tokens = 0
        """Number of tokens among the hits attached last that came from host memory or files."""
        self.block_size = groups.block_size
        self.is_enabled = is_enabled
        self.has_windows = bool(groups.windowed)
        self._observers: list[CacheObserver] = []
        self._advanced: dict[Request, None] = {}
        """Requests that may hold blocks outside their windows."""

    def add_observer(self, observer: CacheObserver) -> None:
        """Report every change to this observer from now on."""
        self._observers.append(observer)
        self.pool.observers.append(observer)

    def announce_stored(self, request: Request, index: int, group: int) -> None:
        """Report that a block of a request can be found from now on."""
        for observer in self._observers:
            observer.on_stored(request, index, group)

    def remove_observer(self, observer: CacheObserver) -> None:
        """Stop reporting changes to this observer."""
        self._observers.remove(observer)
        self.pool.observers.remove(observer)

    @property
    def pools(self) -> list[BlockPool]:
        """The block pool, and the pool of states if there are any."""
        return [self.pool] if self.states is None else [self.pool, self.states.pool]

    @property
    def main_pool(self) -> BlockPool:
        """The pool whose statistics are reported: that of the states if no layer has KV."""
        return self.pool if self.num_groups or self.states is None else self.states.pool

    def reset_contents(self) -> bool:
        """Drop the contents of all blocks and checkpoints. Return False and do nothing if any is in use."""
        if self.loads.in_flight or any(pool.num_free != pool.num_blocks for pool in self.pools):
            return False
        for pool in self.pools:
            pool.reset_contents()
        for tier in self.host_tiers:
            tier.clear()
        return True

    def lose_contents(self) -> bool:
        """Drop everything that workers had, including host memory. Return False and do nothing if any block is in
        use."""
        for tier in self.host_tiers:
            tier.reset()
        return self.reset_contents()

    def forget_contents(self) -> None:
        """Drop the contents of all blocks and checkpoints. Requests keep their blocks, but share neither these nor
        anything they compute later. Called when weights change."""
        self.loads.invalidate()
        for pool in self.pools:
            pool.forget_contents()
        for tier in self.host_tiers:
            tier.clear()
        if self.files is not None:
            self.files.close()
        if self.states is not None:
            self.states.forget()

    def max_chunk(self, request: Request, start: int) -> int | None:
        """Return how many tokens of a request a plan may compute from `start` on. Return None if there is no limit.

        The plan must end at the next checkpoint of the state. The result is 0 if this plan computes that checkpoint for
        another request: this request waits for it.
        """
        return None if self.states is None else self.states.max_chunk(request, start)

    def num_missing_blocks(self, request: Request, num_tokens: int) -> int:
        """Return how many more blocks, over all groups, the request needs to hold `num_tokens` tokens.

        With windows that free blocks meanwhile, this is the maximum held at any time. The next step never needs more. A
        later step may need more if another request holds blocks outside this one's window; it counts again and
        preempts.
        """
        num_blocks = request.num_blocks
        return self._num_missing(num_tokens, num_blocks, [num_blocks - first for first in request.first_blocks])

    def num_blocks_to_start(self, request: Request) -> int:
        """Return the most free blocks that a waiting request occupies at any time for its current tokens.

        Hits that another request holds too do not count as savings in a window: leaving them behind frees no block.
        """
        hits, num_free = self.count_hits(request)
        return sum(num_free) + self._num_missing(request.num_tokens, hits.num_blocks, num_free)

    def _num_missing(self, num_tokens: int, num_blocks: int, num_held: Sequence[int]) -> int:
        """Return `num_missing_blocks` of a request with `num_blocks` blocks per group.

        Args:
            num_tokens: as for `num_missing_blocks`.
            num_blocks: including blocks outside windows.
            num_held: blocks per group that become free once they are outside the window. Empty if there are no windows.
        """
        num_new = max(0, -(-num_tokens // self.block_size) - num_blocks)
        if not self.has_windows:
            return num_new * self.num_groups
        num_missing = num_new * len(self.groups.full)
        for group in self.groups.windowed:
            held = num_held[group.index] if num_held else 0
            num_missing += min(num_new, max(0, group.max_held - held))
        return num_missing

    def count_hits(self, request: Request) -> tuple[Hits, list[int]]:
        """Return what `attach_hits` would find now, and how many free blocks it would occupy per group."""
        return self.lookup.count(request)

    def attach_hits(self, request: Request) -> int:
        """Attach the cached blocks that follow the request's own blocks.

        At least one token is left to compute, because its logits are needed.

        Returns:
            The number of tokens that need not be computed.
        """
        if not request.block_ids:
            request.block_ids = [[] for _ in range(self.groups.num_lists)]
            request.first_blocks = [0] * self.num_groups if self.has_windows else NO_LIST
        hits = self.lookup.find(request)
        if not hits.num_blocks:
            return 0
        for own, found in zip(request.block_ids, hits.block_ids, strict=False):
            for block_id in found:
                if block_id != NULL_BLOCK:
                    self.pool.incref(block_id)
            own += [NULL_BLOCK] * (hits.num_blocks - len(found))
            own += found
        self.num_loaded_tokens = self.loads.num_arrived(request) * self.block_size
        if self.host is not None:
            self.num_loaded_tokens += self._copy_in(self.host, request, hits)
        if self.states is not None:
            if hits.state == NULL_BLOCK:
                self.num_loaded_tokens = hits.num_blocks * self.block_size
            self.states.attach(request, hits.num_blocks, hits.state)
        request.num_blocks += hits.num_blocks
        num_tokens = hits.num_blocks * self.block_size
        request.num_computed_tokens += num_tokens
        self._free_passed_blocks(request)
        return num_tokens

    def _copy_in(self, host: HostTier, request: Request, hits: Hits) -> int:
        """Allocate the new hits of a request that only the host tier has. Return their number of tokens."""
        lost = absent_places(request.num_blocks + hits.num_blocks, hits.block_ids, NULL_BLOCK)
        keys = self.lookup.keys(request, lost)
        host.pin(keys)  # blocks evicted by the allocations below must not replace these
        for (index, group), key in zip(lost, keys, strict=True):
            block_id = request.block_ids[group][index] = self.pool.allocate()
            host.copy_in(key, block_id)
            self.pool.set_hash(block_id, key)
            self.announce_stored(request, index, group)
        return len({index for index, _ in lost}) * self.block_size

    def begin_load(self, request: Request) -> None:
        """Begin to load the blocks of a waiting request that are not on the device."""
        hits, absent = self.count_hits(request)[0], self.lookup.absent(request)
        if self.states is not None and hits.state != NULL_BLOCK:
            self.states.touch(hits.state)
        held = [block_id for found in hits.block_ids for block_id in found if block_id != NULL_BLOCK]
        self.loads.begin(request, absent.places, absent.keys, held, absent.state_key)

    def finish_load(
        self,
        number: int,
        missing: Collection[BlockId],
        elapsed_s: float = 0.0,
        missing_states: Collection[BlockId] = (),
    ) -> Request | None:
        """End a load. Return the request that waits for it. Return None if it does not wait any more."""
        if (ended := self.loads.finish(number, missing, missing_states)) is None:
            return None
        load, arrived = ended
        if not missing and not missing_states:
            num_states = len(load.states_from_files)
            self.copy_cost.observe_load(len(load.from_host), len(load.from_files), elapsed_s, num_states)
        for place in arrived:
            self.announce_stored(load.request, *load.places[place])
        return load.request if load.request.state is RequestState.SWAPPED else None

    def take_copies(self) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """Return the copies that workers make before the step being planned: see `StepPlan`."""
        return ([], []) if self.host is None else self.host.take_copies()

    def take_state_copies(self) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """Return the copies of states. Without a step they wait for the next step, which is the first that may
        write."""
        return ([], []) if self.states is None or self.states.host is None else self.states.host.take_copies()

    def extend(self, request: Request, num_tokens: int) -> None:
        """Allocate blocks so that the request can hold `num_tokens` tokens.

        Raises:
            OutOfBlocks: there are not enough free blocks.
        """
        if self.has_windows:
            self._advanced[request] = None
        num_new = -(-num_tokens // self.block_size) - request.num_blocks
        if num_new <= 0:
            return
        for block_ids in request.block_ids[: self.num_groups]:
            for _ in range(num_new):
                block_ids.append(self.pool.allocate())
        if self.states is not None:
            self.states.extend(request, num_new)
        request.num_blocks += num_new

    def free_passed_blocks(self) -> None:
        """Free the blocks outside windows and the state slots that are no longer needed since the last call.

        Called between two plans.
        """
        if self.states is not None:
            self.states.end_plan()
        for request in self._advanced:
            self._free_passed_blocks(request)
        self._advanced = {request: None for request in self._advanced if self._passes_blocks(request)}

    def _passes_blocks(self, request: Request) -> bool:
        """Return whether a request may pass more of its blocks before `extend` is called again: once its uncertain
        tokens are known, or while it fills spare blocks, which it keeps if these tokens do not materialize."""
        num_spare_tokens = request.num_blocks * self.block_size - request.num_computed_tokens
        return request.num_uncertain_tokens > 0 or num_spare_tokens >= self.block_size

    def _free_passed_blocks(self, request: Request) -> None:
        position = request.num_computed_tokens - request.num_uncertain_tokens
        if self.states is not None and (before := self.states.pre_draft_state(request)) is not None:
            position = before.num_tokens
        for group in self.groups.windowed:
            start = request.first_blocks[group.index]
            end = min(group.first_block(position), request.num_blocks)
            if end <= start:
                continue
            block_ids = request.block_ids[group.index]
            self.pool.release([block_id for block_id in block_ids[start:end] if block_id != NULL_BLOCK])
            block_ids[start:end] = [NULL_BLOCK] * (end - start)
            request.first_blocks[group.index] = end

    def cache_full_blocks(self, request: Request) -> None:
        """Set the hashes of the request's full blocks whose tokens are known and computed, in this plan or before."""
        if not self.is_enabled or request.is_mixed:
            return
        if self.states is not None:
            self.states.on_computed(request)
        self._hash_full_blocks(request)

    def _hash_full_blocks(self, request: Request) -> None:
        num_full = min(request.num_computed_tokens, len(request.token_ids)) // self.block_size
        first = request.num_hashed_blocks
        if num_full <= first:
            return
        hash_of_block(request, num_full - 1, self.block_size)
        hashes, set_hash = request.block_hashes, self.pool.set_hash
        for group, suffix in enumerate(self.groups.key_suffixes):
            block_ids = request.block_ids[group]
            for index in range(first, num_full):
                block_id = block_ids[index]
                if block_id != NULL_BLOCK and set_hash(block_id, hashes[index] + suffix):
                    self.announce_stored(request, index, group)
        request.num_hashed_blocks = num_full

    def has_unhashed_block(self, request: Request) -> bool:
        """Return whether `cache_full_blocks` has work to do once the request's known tokens are computed."""
        return (
            self.is_enabled
            and not request.is_mixed
            and len(request.token_ids) // self.block_size > request.num_hashed_blocks
        )

    def next_hash_length(self, request: Request) -> float:
        """Return how many known tokens the request must have before another block can be hashed."""
        return (len(request.token_ids) // self.block_size + 1) * self.block_size if self.is_enabled else math.inf

    def invalidate_blocks(self, request: Request) -> None:
        """Remove everything the request has computed or shared from the cache: it may contain NaN.

        Earlier positions are affected too. A weight of zero does not turn NaN into zero, so later layers store NaN for
        all positions of the step.
        """
        for block_hash in request.block_hashes:
            for suffix in self.groups.key_suffixes:
                self.pool.drop_hash(block_hash + suffix)
                if self.host is not None:
                    self.host.drop(block_hash + suffix)
                if self.files is not None:
                    self.files.discard(block_hash + suffix)
        if self.states is not None:
            self.states.invalidate(request, self.files)
        request.num_hashed_blocks = request.num_blocks  # a block without a hash never gets one

    def release(self, request: Request) -> None:
        """Free all blocks of a request. Their contents stay in the cache until the blocks are allocated again."""
        if self.is_enabled and not request.is_mixed:
            self._hash_full_blocks(request)
        if self.states is not None:
            self.states.release(request)
        if self.num_groups == 1 and not self.has_windows:
            self.pool.release(request.block_ids[0])
        else:  # from tail to head in all groups at once, because a hit needs blocks of every group
            blocks = zip(*request.block_ids[: self.num_groups], strict=True)
            self.pool.release([block_id for ids in blocks for block_id in ids if block_id != NULL_BLOCK])
            self._advanced.pop(request, None)
        request.block_ids = request.first_blocks = NO_LIST
        request.num_blocks = 0
        request.num_hashed_blocks = 0
        request.num_computed_tokens = 0
        request.is_mixed = False  # it recomputes from its first token on
