"""The slots of recurrent states: which slots a request reads and writes, and the checkpoints that other requests use.

Called only by `PrefixCache`, which does the same for blocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from octavo.core_proc.cache.files import FileTier
from octavo.core_proc.cache.groups import NULL_BLOCK, StateGroup
from octavo.core_proc.cache.hashes import hash_of_block
from octavo.core_proc.cache.host_tier import HostTier
from octavo.core_proc.cache.pool import BlockPool, ContentObserver
from octavo.core_proc.request import Request
from octavo.protocol.ids import BlockId
from octavo.protocol.prefix_hash import HASH_BYTES
from octavo.protocol.steps import StateMove


@dataclass(frozen=True, slots=True)
class PreDraftState:
    """The state that a request restarts from if a draft is rejected."""

    slot: BlockId
    num_tokens: int
    """Number of tokens that the state has read."""
    num_stored: int
    """Number of tokens whose KV remains valid. Recomputing them stores the same KV."""


class StateObserver(ContentObserver, Protocol):
    """Observes which checkpoints can be found."""

    def on_state_stored(self, request: Request, num_blocks: int, slot: BlockId, *, is_computed: bool) -> None:
        """The state after this many blocks of a request can be found from now on.

        Args:
            request: the request; the hashes of these blocks are known.
            num_blocks: number of blocks before the state.
            slot: slot of the state.
            is_computed: False if it arrives from host memory or another engine, with the next plan.
        """


class StateSlots:
    """The states of requests, each in a slot of a separate pool.

    A step reads the state of a request from the slot of the block that holds the token before the step's first token.
    It writes the state to the slot of the block with the step's last token. Both are the same slot until the request
    reaches a checkpoint; it then continues in another slot. The checkpoint's slot can be found by the hash of its block
    and is not written any more.

    Invariants: a slot that has a hash or several owners is not written. A request holds at most `StateGroup.max_held`
    slots, so every running request can be extended if the pool has that many slots for each.

    A checkpoint can be found from the plan after the one that computes it, because the requests of a step read their
    states before any state is written.

    A step that verifies drafts writes to another slot than it reads. If a draft is rejected, the request restarts from
    the state before all drafts, and its next step recomputes the accepted tokens.

    If host memory keeps states, evicted checkpoints stay there and are copied into a free slot for a request that can
    continue from them. Workers make these copies before the step. Checkpoints in files are loaded through host memory.

    Args:
        group: the model's state group.
        num_slots: number of slots in the pool.
        key_suffix: suffix that the keys of states append to block hashes.
        num_host_states: number of states in host memory.
        offloads: whether evicted checkpoints are copied to host memory.
    """

    def __init__(
        self, group: StateGroup, num_slots: int, key_suffix: bytes, num_host_states: int = 0, *, offloads: bool = False
    ) -> None:
        self.group = group
        self.pool = BlockPool(num_slots)
        self.host = HostTier(num_host_states) if num_host_states and group.interval > 0 else None
        """Host memory tier of states. None if there is none."""
        if self.host is not None and offloads:
            self.pool.on_evicted = self.host.on_evicted
        self._observers: list[StateObserver] = []
        self.max_requests = num_slots // group.max_held
        """Most requests that may run at the same time."""
        self.key_suffix = key_suffix
        self._has_checkpoints = group.interval > 0
        self._written: dict[Request, int] = {}
        """Requests that reach a checkpoint in this plan, with the index of the block before it."""
        self._passed: dict[Request, int] = {}
        """Requests that continue from a checkpoint in this plan, with the index of the block before it."""
        self._awaited: set[bytes] = set()
        """Hashes of the blocks before checkpoints that this plan computes."""
        self._invalid: set[Request] = set()
        """Requests whose states may contain NaN."""
        self._pre_draft_states: dict[Request, PreDraftState] = {}
        """States before drafts, for requests whose drafts are being verified or were rejected."""

    def add_observer(self, observer: StateObserver) -> None:
        """Report every change to this observer from now on."""
        self._observers.append(observer)
        self.pool.observers.append(observer)

    def remove_observer(self, observer: StateObserver) -> None:
        """Stop reporting changes to this observer."""
        self._observers.remove(observer)
        self.pool.observers.remove(observer)

    def end_plan(self) -> None:
        """Make the checkpoints of the previous plan available, and free the slots that it has read. Called between
        plans."""
        for request, index in self._written.items():
            self._cache(request, index)
        for request, index in self._passed.items():
            self._drop(request, index)
        self._written.clear()
        self._passed.clear()
        self._awaited.clear()

    def forget(self) -> None:
        """Do not make checkpoints of the previous plan available: see `PrefixCache.forget_contents`."""
        self._written.clear()
        self._awaited.clear()

    def extend(self, request: Request, num_new: int) -> None:
        """Add entries for new blocks. The last entry receives the state after their last token.

        Raises:
            OutOfBlocks: more requests run than the pool has slots for.
        """
        slots = request.block_ids[self.group.index]
        slot = slots[-1] if slots else NULL_BLOCK
        if slot == NULL_BLOCK or self._is_kept(request, slot):
            if slot != NULL_BLOCK:
                self._passed[request] = len(slots) - 1
            slot = self.pool.allocate()
        else:
            slots[-1] = NULL_BLOCK
        slots += [NULL_BLOCK] * (num_new - 1)
        slots.append(slot)

    def _is_kept(self, request: Request, slot: BlockId) -> bool:
        """Return whether the slot must keep the state after the request's last token."""
        if not self._has_checkpoints:
            return False
        return (
            self.group.is_kept(request.num_computed_tokens, request.num_prompt_tokens)
            or self.pool.block_hash(slot) is not None
            or self.pool.num_references(slot) > 1
        )

    def attach(self, request: Request, num_new: int, slot: BlockId) -> None:
        """Continue from a checkpoint that is `num_new` blocks after the request's last block.

        Args:
            request: a request with an entry for each block before the new ones.
            num_new: number of new blocks.
            slot: slot of the checkpoint; `NULL_BLOCK` if host memory has it.
        """
        slots = request.block_ids[self.group.index]
        if slots:
            self._drop(request, len(slots) - 1)
        if slot == NULL_BLOCK:
            slot = self._copy_in(request, len(slots) + num_new)
        else:
            self.pool.incref(slot)
        slots += [NULL_BLOCK] * (num_new - 1)
        slots.append(slot)

    def _copy_in(self, request: Request, num_blocks: int) -> BlockId:
        """Have a checkpoint copied from host memory to a slot, where it can be found from now on."""
        assert self.host is not None, "a checkpoint is elsewhere"
        key = self.key(request, num_blocks)
        self.host.pin([key])  # a state evicted by the allocation must not replace this one
        slot = self.pool.allocate()
        self.host.copy_in(key, slot)
        self._store(request, num_blocks, slot, is_computed=False)
        return slot

    def touch(self, slot: BlockId) -> None:
        """Make a checkpoint the last one to be evicted: a request continues from it as soon as its blocks are loaded.

        The checkpoint is not held, because running requests may need all slots.
        """
        self.pool.incref(slot)
        self.pool.release([slot])

    def take(self, request: Request, num_blocks: int) -> BlockId | None:
        """Return a free slot where the state after this many blocks can be found from now on. It arrives from another
        engine before the next plan. Return None if the state is cached already or no slot is free."""
        key = self.key(request, num_blocks)
        if self.pool.find(key) is not None or not self.pool.num_free:
            return None
        # The evicted state is not offloaded: that copy would be made after the new state has arrived.
        slot = self.pool.allocate(keeps_evicted=False)
        self._store(request, num_blocks, slot, is_computed=False)
        self.pool.release([slot])
        return slot

    def is_key(self, key: bytes) -> bool:
        """Return whether a key from another engine belongs to a state."""
        return len(key) == HASH_BYTES + len(self.key_suffix) and key.endswith(self.key_suffix)

    def max_draft_tokens(self, request: Request, position: int) -> int:
        """Return how many drafts a step may verify after `position`, so that no draft reaches a checkpoint."""
        if not self._has_checkpoints:
            return request.max_num_tokens
        return max(0, self.group.next_kept(position - 1, request.num_prompt_tokens) - 1 - position)

    def max_decode_steps(self, request: Request) -> int:
        """Return how many tokens of a request a plan with several steps may compute.

        The plan must end at or before the next checkpoint, and may need only one new block: of several new blocks, only
        the last one has an entry for the state.
        """
        position, size = request.num_computed_tokens, self.group.block_size
        most = (request.num_blocks + 1) * size - position
        if self._has_checkpoints:
            most = min(most, self.group.next_kept(position, request.num_prompt_tokens) - position)
        return most

    def keep_pre_draft_state(self, request: Request) -> None:
        """Keep the state of a request before this plan, which computes drafts, until the drafts are verified.

        Raises:
            OutOfBlocks: more requests run than the pool has slots for.
        """
        num_tokens = request.num_computed_tokens
        if (before := self._pre_draft_states.get(request)) is not None:  # this plan recomputes the accepted tokens
            self._pre_draft_states[request] = replace(before, num_stored=num_tokens)
            return
        slots = request.block_ids[self.group.index]
        if (passed := self._passed.pop(request, None)) is not None:  # this plan continues in another slot anyway
            slot, slots[passed] = slots[passed], NULL_BLOCK
        else:
            slot, slots[-1] = slots[-1], self.pool.allocate()
        self._pre_draft_states[request] = PreDraftState(slot, num_tokens - 1, num_tokens)

    def end_verification(self, request: Request, *, all_accepted: bool) -> None:
        """Note whether all drafts of a request were accepted. If not, it restarts from the state before them."""
        if all_accepted and (before := self._pre_draft_states.pop(request, None)) is not None:
            self.pool.release([before.slot])

    def has_pre_draft_state(self, request: Request) -> bool:
        """Return whether the state before a request's latest drafts is kept: they are being verified, or one was
        rejected."""
        return request in self._pre_draft_states

    def pre_draft_state(self, request: Request) -> PreDraftState | None:
        """Return the state from which a request restarts if a draft is rejected. Return None if it has no drafts."""
        return self._pre_draft_states.get(request)

    def take_moves(self, requests: Iterable[Request]) -> list[StateMove]:
        """Return the state moves of a plan that computes tokens of these requests. The plan must need no more slots."""
        moves: list[StateMove] = []
        for request in requests if self._pre_draft_states else ():
            if (before := self._pre_draft_states.get(request)) is None:
                continue
            assert request.slot is not None, "a request that is computed has a slot"
            moves.append((request.slot, before.slot, request.block_ids[self.group.index][-1]))
            if not request.num_uncertain_tokens:
                self.pool.release([self._pre_draft_states.pop(request).slot])
        return moves

    def held(self, request: Request) -> list[BlockId]:
        """Return the slots of a running request."""
        slots = [slot for slot in request.block_ids[self.group.index] if slot != NULL_BLOCK]
        return [*slots, self._pre_draft_states[request].slot] if request in self._pre_draft_states else slots

    def on_computed(self, request: Request) -> None:
        """Note that the plan computes tokens of a request up to `num_computed_tokens`."""
        num_tokens = request.num_computed_tokens
        if not self.group.is_kept(num_tokens, request.num_prompt_tokens):
            return
        index = num_tokens // self.group.block_size - 1
        self._written[request] = index
        if num_tokens <= len(request.token_ids):
            self._awaited.add(hash_of_block(request, index, self.group.block_size))

    def max_chunk(self, request: Request, start: int) -> int | None:
        """See `PrefixCache.max_chunk`."""
        if not self._has_checkpoints:
            return None
        if self._awaits_checkpoint(request):
            return 0
        return self.group.next_kept(start, request.num_prompt_tokens) - request.num_computed_tokens

    def _awaits_checkpoint(self, request: Request) -> bool:
        """Return whether this plan computes, for another request, the next checkpoint that this request can use."""
        size = self.group.block_size
        first, partial = divmod(request.num_computed_tokens, size)
        if not self._awaited or partial or first != request.num_blocks or not request.reads_prefix_cache:
            return False
        following = self.group.next_kept(request.num_computed_tokens, request.num_prompt_tokens)
        if following >= len(request.token_ids):
            return False
        return hash_of_block(request, following // size - 1, size) in self._awaited

    def last_checkpoint(self, request: Request, end: int, keys: list[bytes], files: FileTier | None = None) -> int:
        """Return the largest number of leading blocks, at most `end`, after which there is a checkpoint.

        Args:
            request: the request whose blocks they are.
            end: upper limit in blocks.
            keys: receives the looked-up keys.
            files: file tier, which counts too if host memory has room to load from it. None if files do not count.
        """
        if self.host is None or not self.host.has_room:
            files = None
        while end and not self._has_checkpoint(request, end, keys, files):
            end -= 1
        return end

    def last_on_device(self, request: Request, end: int) -> int:
        """Return the largest number of leading blocks, at most `end`, after which there is a checkpoint on the
        device."""
        while end and self.pool.find(self.key(request, end)) is None:
            end -= 1
        return end

    def last_of_next_checkpoints(self, request: Request, first: int, end: int, keys: list[bytes]) -> int:
        """Return the number of blocks before the last checkpoint that is reachable from `first` without a gap; at most
        `end`.

        A running request searches in each step, so it searches only where it would leave checkpoints itself.
        """
        found, size = first, self.group.block_size
        while self._has_checkpoints:
            following = self.group.next_kept(found * size, request.num_prompt_tokens) // size
            if following > end or not self._has_checkpoint(request, following, keys):
                break
            found = following
        return found

    def checkpoint(self, request: Request, num_blocks: int) -> BlockId:
        """Return the slot of the checkpoint after this many blocks of a request. Return `NULL_BLOCK` if it is not on
        the device."""
        slot = self.pool.find(self.key(request, num_blocks))
        return NULL_BLOCK if slot is None else slot

    def _has_checkpoint(
        self, request: Request, num_blocks: int, keys: list[bytes], files: FileTier | None = None
    ) -> bool:
        keys.append(key := self.key(request, num_blocks))
        is_in_host = self.host is not None and key in self.host
        return is_in_host or self.pool.find(key) is not None or (files is not None and key in files)

    def key(self, request: Request, num_blocks: int) -> bytes:
        """Return the pool key of the state after this many blocks, whose tokens must be known."""
        return hash_of_block(request, num_blocks - 1, self.group.block_size) + self.key_suffix

    def invalidate(self, request: Request, files: FileTier | None) -> None:
        """Remove everything that the request has computed or shared from the cache, now and when it ends."""
        for block_hash in request.block_hashes:
            self.pool.drop_hash(block_hash + self.key_suffix)
            if self.host is not None:
                self.host.drop(block_hash + self.key_suffix)
            if files is not None:
                files.discard(block_hash + self.key_suffix)
        self._written.pop(request, None)
        if request.block_ids:  # not released yet
            self._invalid.add(request)

    def release(self, request: Request) -> None:
        """Free the slots of a request. A state at the end of a block stays in the cache."""
        slots = request.block_ids[self.group.index]
        last = len(slots) - 1
        if self._has_checkpoints and request.num_computed_tokens == len(slots) * self.group.block_size > 0:
            self._cache(request, last)
        if (passed := self._passed.pop(request, None)) is not None:
            self._drop(request, passed)
        if (before := self._pre_draft_states.pop(request, None)) is not None:
            self.pool.release([before.slot])
        if slots:
            self._drop(request, last)
        self._written.pop(request, None)
        self._invalid.discard(request)

    def _cache(self, request: Request, index: int) -> None:
        """Make the state after a block available, if its tokens are known."""
        slot = request.block_ids[self.group.index][index]
        assert slot != NULL_BLOCK, f"{request.request_id} has no state after block {index}"
        if (index + 1) * self.group.block_size > len(request.token_ids) or request in self._invalid:
            return
        if not request.is_mixed:
            self._store(request, index + 1, slot, is_computed=True)

    def _store(self, request: Request, num_blocks: int, slot: BlockId, *, is_computed: bool) -> None:
        """Make a state available under the key of its tokens, unless another slot has the same key."""
        if self.pool.set_hash(slot, self.key(request, num_blocks)):
            for observer in self._observers:
                observer.on_state_stored(request, num_blocks, slot, is_computed=is_computed)

    def _drop(self, request: Request, index: int) -> None:
        """Free the slot of an entry, unless the request continues in it."""
        slots = request.block_ids[self.group.index]
        self.pool.release([slots[index]])
        slots[index] = NULL_BLOCK
