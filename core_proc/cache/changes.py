"""`CacheChanges`: what has changed in the prefix cache since the last look, for frontends that choose engines."""

from collections import Counter

from octavo.core_proc.cache.groups import CacheGroups
from octavo.core_proc.cache.prefix import PrefixCache
from octavo.core_proc.request import Request
from octavo.protocol.ids import BlockId
from octavo.protocol.prefix_hash import HASH_BYTES, SHORT_HASH_BYTES, span_blocks


class CacheChanges:
    """Observes a cache, and keeps the net changes of one group: of several of one block only the last counts.

    The group is the first that keeps every token. If all have windows it is the first one, of which early blocks may be
    gone though a prefix can be found: readers then take it for shorter than it is. If no layer has keys and values, a
    checkpoint of the recurrent state counts as all blocks before it.

    Stored blocks are kept only if they end a span, which saves readers most of their work when blocks are small.
    """

    def __init__(self, groups: CacheGroups) -> None:
        self._span_blocks = span_blocks(groups.block_size)
        self._group = groups.full[0] if groups.full else 0
        self._has_blocks = groups.num_groups > 0
        self._before_state: dict[bytes, list[bytes]] = {}
        """The blocks before each checkpoint that end a span, if there are no other blocks."""
        self._num_states: Counter[bytes] = Counter()
        """How many checkpoints follow each of these blocks."""
        self._suffix = groups.key_suffixes[self._group] if groups.num_groups else b""
        self._changes: dict[bytes, bool] = {}
        """Whether the block can be found now, by its key in the pool."""
        self.has_cleared = False
        """True if all contents were dropped since the last call of `take`; the changes are those after it."""

    def __bool__(self) -> bool:
        return bool(self._changes) or self.has_cleared

    def observe(self, cache: PrefixCache) -> None:
        """Keep all changes of a cache from now on."""
        cache.add_observer(self)
        if cache.states is not None and not self._has_blocks:
            cache.states.add_observer(self)

    def end(self, cache: PrefixCache) -> None:
        """Keep no more changes, and forget those so far."""
        cache.remove_observer(self)
        if cache.states is not None and not self._has_blocks:
            cache.states.remove_observer(self)
        self._forget_states()
        self.clear()

    def on_stored(self, request: Request, index: int, group: int) -> None:
        """See `CacheObserver`."""
        if group == self._group and (index + 1) % self._span_blocks == 0:
            self._changes[request.block_hashes[index] + self._suffix] = True

    def on_state_stored(self, request: Request, num_blocks: int, slot: BlockId, *, is_computed: bool) -> None:
        """See `StateObserver`."""
        size = self._span_blocks
        before = [request.block_hashes[index] for index in range(size - 1, num_blocks, size)]
        self._before_state[request.block_hashes[num_blocks - 1]] = before
        self._num_states.update(before)
        self._changes.update(dict.fromkeys(before, True))

    def on_removed(self, block_hash: bytes) -> None:
        """See `ContentObserver`."""
        if not self._has_blocks:
            before = self._before_state.pop(block_hash[:HASH_BYTES], [])
            self._num_states.subtract(before)
            for key in before:
                if not self._num_states[key]:
                    del self._num_states[key]
                    self._changes[key] = False
        elif block_hash[HASH_BYTES:] == self._suffix:
            self._changes[block_hash] = False

    def on_cleared(self) -> None:
        """See `ContentObserver`."""
        self._forget_states()
        self._changes.clear()
        self.has_cleared = True

    def contents(self, cache: PrefixCache) -> list[bytes]:
        """Return the keys of all blocks that can be found now, as far as readers may learn of them."""
        return cache.pool.cached_hashes() if self._has_blocks else list(self._num_states)

    def is_stored(self, cache: PrefixCache, key: bytes) -> bool:
        """Return whether one of `contents` can still be found."""
        return cache.pool.find(key) is not None if self._has_blocks else key in self._num_states

    def _forget_states(self) -> None:
        self._before_state.clear()
        self._num_states.clear()

    def take(self) -> tuple[bytes, bytes]:
        """Return the short hashes of the blocks that were stored and removed since the last call."""
        changes = self._changes
        self.clear()
        stored = [key for key, is_stored in changes.items() if is_stored]
        removed = [key for key, is_stored in changes.items() if not is_stored]
        return self.short_hashes(stored), self.short_hashes(removed)

    def clear(self) -> None:
        """Forget all changes."""
        self._changes = {}
        self.has_cleared = False

    def short_hashes(self, keys: list[bytes]) -> bytes:
        """Return the short hashes of those among some keys of the pool that are of the group, one after another."""
        return b"".join([key[:SHORT_HASH_BYTES] for key in keys if key[HASH_BYTES:] == self._suffix])
