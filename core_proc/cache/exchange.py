"""Contents of blocks that leave the cache for another engine, or come from one. Copies nothing itself."""

from collections.abc import Iterator, Sequence

from octavo.core_proc.cache.hashes import hash_of_block
from octavo.core_proc.cache.prefix import PrefixCache
from octavo.core_proc.request import Request
from octavo.protocol.ids import BlockId


def blocks_to_give(cache: PrefixCache, request: Request) -> list[tuple[bytes, BlockId]]:
    """Return the blocks from which an equal prompt can continue, with their keys in the pool, from its start on.

    Some may be free: workers must read them before the next plan overwrites them.
    """
    found: list[tuple[bytes, BlockId]] = []
    if cache.host is not None and cache.host.has_copies:
        return found
    for keys in _keys_by_block(cache, request):
        if any(cache.pool.find(key) is None for group, key in keys if _is_full(cache, group)):
            break
        found += [(key, block_id) for _, key in keys if (block_id := cache.pool.find(key)) is not None]
    return found


def take_blocks(cache: PrefixCache, request: Request, keys: Sequence[bytes]) -> list[tuple[int, BlockId]]:
    """Make room for contents that come from elsewhere, as far as a request needs them and blocks are free.

    The blocks can be found from now on, and are free: workers must have the contents before the next plan.

    Args:
        cache: finds them.
        request: waits; the contents are for its prompt.
        keys: of the contents, in the pool.

    Returns:
        Index among `keys`, and block, of those that the request needs.
    """
    pool, places = cache.pool, {key: place for place, key in enumerate(keys)}
    if cache.host is not None and cache.host.has_copies:
        return []
    wanted: list[tuple[int, int, bytes]] = []
    held: dict[bytes, BlockId] = {}
    for index, block in enumerate(_keys_by_block(cache, request)):
        if any(key not in places and pool.find(key) is None for group, key in block if _is_full(cache, group)):
            break
        for group, key in block:
            if (block_id := pool.find(key)) is not None:
                pool.incref(block_id)  # or the others could take its place
                held[key] = block_id
            wanted.append((index, group, key))
    taken: list[tuple[int, BlockId]] = []
    # What these blocks lose is not offloaded: that copy would be made after their new contents have come.
    on_evicted, pool.on_evicted = pool.on_evicted, None
    for index, group, key in wanted:
        if key not in held and key in places and pool.num_free:
            block_id = held[key] = pool.allocate()
            pool.set_hash(block_id, key)
            cache.announce_stored(request, index, group)
            taken.append((places[key], block_id))
    pool.on_evicted = on_evicted
    pool.release([held[key] for _, _, key in wanted if key in held])
    return taken


def _is_full(cache: PrefixCache, group: int) -> bool:
    return group in cache.groups.full


def _keys_by_block(cache: PrefixCache, request: Request) -> Iterator[list[tuple[int, bytes]]]:
    """Yield group and key of what an equal prompt needs of each block to continue after the last whole one."""
    groups, size = cache.groups, cache.block_size
    end = (request.num_prompt_tokens - 1) // size
    first = [0] * groups.num_groups
    for windowed in groups.windowed:
        first[windowed.index] = windowed.first_block(end * size)
    for index in range(end):
        block_hash = hash_of_block(request, index, size)
        suffixes = enumerate(groups.key_suffixes)
        yield [(group, block_hash + suffix) for group, suffix in suffixes if index >= first[group]]
