"""Block contents that leave the cache for another engine, or arrive from one. Copies nothing itself."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from octavo.core_proc.cache.hashes import hash_of_block
from octavo.core_proc.cache.prefix import PrefixCache
from octavo.core_proc.cache.states import StateSlots
from octavo.core_proc.request import Request
from octavo.protocol.ids import BlockId


class OfferedContents(NamedTuple):
    """The cached contents of a prompt that an engine gives to another one."""

    num_tokens: int
    """Number of prompt tokens after which an equal prompt can continue."""
    blocks: list[tuple[bytes, BlockId]]
    """Blocks with their pool keys."""
    states: list[tuple[bytes, BlockId]]
    """Slot of the recurrent state after these tokens, with its key. Empty if the model has no states."""


class ReceivedContents(NamedTuple):
    """Contents of another engine for which there is room: their index in the list of keys, and the block or slot to
    fill."""

    blocks: list[tuple[int, BlockId]]
    states: list[tuple[int, BlockId]]
    """Indices among the state keys, and the slots to fill."""


def contents_to_offer(cache: PrefixCache, request: Request) -> OfferedContents:
    """Return the blocks and the state from which an equal prompt can continue, starting with the first block.

    Some of them may be free: workers must read them before the next plan overwrites them.
    """
    end = (request.num_prompt_tokens - 1) // cache.block_size
    states: list[tuple[bytes, BlockId]] = []
    if cache.states is not None:
        end = cache.states.last_on_device(request, end)
        states = [(cache.states.key(request, end), cache.states.checkpoint(request, end))] if end else []
    nothing = OfferedContents(0, [], [])
    if any(tier.has_copies for tier in cache.host_tiers) or (cache.states is not None and not states):
        return nothing
    found: list[tuple[bytes, BlockId]] = []
    for keys in _keys_by_block(cache, request, end):
        if any(cache.pool.find(key) is None for group, key in keys if _is_full(cache, group)):
            if states:
                return nothing
            break
        found += [(key, block_id) for _, key in keys if (block_id := cache.pool.find(key)) is not None]
    return OfferedContents(end * cache.block_size, found, states)


def num_block_keys(cache: PrefixCache, keys: Sequence[bytes]) -> int:
    """Return how many of another engine's keys are those of blocks. The keys of states follow them."""
    states = cache.states
    return len(keys) if states is None else sum([not states.is_key(key) for key in keys])


def take_blocks(cache: PrefixCache, request: Request, keys: Sequence[bytes]) -> ReceivedContents:
    """Make room for contents from another engine, as far as a request needs them and blocks are free.

    They can be found in the cache from now on, in free blocks and slots. So workers must have received the contents
    before the next plan.

    Args:
        cache: the cache that receives the contents.
        request: the waiting request whose prompt needs the contents.
        keys: pool keys of the contents: first those of blocks, then those of states.
    """
    end = (request.num_prompt_tokens - 1) // cache.block_size
    states = ReceivedContents([], [])
    if any(tier.has_copies for tier in cache.host_tiers):
        return states
    first_state = num_block_keys(cache, keys)
    end = _num_available(cache, request, keys[:first_state], end)
    if cache.states is not None:
        end = _end_of_state(cache.states, request, end, keys[first_state:])
        if end and (slot := cache.states.take(request, end)) is not None:
            states.states.append((keys.index(cache.states.key(request, end)) - first_state, slot))
    return ReceivedContents(_take_blocks(cache, request, keys[:first_state], end), states.states)


def _num_available(cache: PrefixCache, request: Request, keys: Sequence[bytes], end: int) -> int:
    """Return how many leading blocks of a prompt, at most `end`, are cached or can be taken in each full group."""
    known = set(keys)
    for index, block in enumerate(_keys_by_block(cache, request, end)):
        if any(_is_full(cache, group) and key not in known and cache.pool.find(key) is None for group, key in block):
            return index
    return end


def _end_of_state(states: StateSlots, request: Request, end: int, keys: Sequence[bytes]) -> int:
    """Return the largest number of blocks, at most `end`, after which the state is cached or can be taken; 0 if
    none."""
    has_room = states.pool.num_free > 0
    while end:
        key = states.key(request, end)
        if states.pool.find(key) is not None or (has_room and key in keys):
            break
        end -= 1
    return end


def _take_blocks(cache: PrefixCache, request: Request, keys: Sequence[bytes], end: int) -> list[tuple[int, BlockId]]:
    """Make room for the first `end` blocks of the prompt; see `take_blocks`."""
    pool, places = cache.pool, {key: place for place, key in enumerate(keys)}
    wanted: list[tuple[int, int, bytes]] = []
    held: dict[bytes, BlockId] = {}
    for index, block in enumerate(_keys_by_block(cache, request, end)):
        for group, key in block:
            if (block_id := pool.find(key)) is not None:
                pool.incref(block_id)  # otherwise the blocks allocated below could evict it
                held[key] = block_id
            wanted.append((index, group, key))
    taken: list[tuple[int, BlockId]] = []
    # Evicted contents are not offloaded: their copies would be made after the new contents have arrived.
    for index, group, key in wanted:
        if key not in held and key in places and pool.num_free:
            block_id = held[key] = pool.allocate(keeps_evicted=False)
            pool.set_hash(block_id, key)
            cache.announce_stored(request, index, group)
            taken.append((places[key], block_id))
    pool.release([held[key] for _, _, key in wanted if key in held])
    return taken


def _is_full(cache: PrefixCache, group: int) -> bool:
    return group in cache.groups.full


def _keys_by_block(cache: PrefixCache, request: Request, end: int) -> Iterator[list[tuple[int, bytes]]]:
    """Yield for each of `end` blocks the groups and keys that an equal prompt needs to continue after the last
    block."""
    groups, size = cache.groups, cache.block_size
    first = [0] * groups.num_groups
    for windowed in groups.windowed:
        first[windowed.index] = windowed.first_block(end * size)
    for index in range(end):
        block_hash = hash_of_block(request, index, size)
        suffixes = enumerate(groups.key_suffixes)
        yield [(group, block_hash + suffix) for group, suffix in suffixes if index >= first[group]]
