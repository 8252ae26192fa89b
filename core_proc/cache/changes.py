"""`CacheChanges`: what has changed in the prefix cache since the last look, for frontends that choose engines."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core_proc.cache.prefix import PrefixCache
from octavo.core_proc.request import Request
from octavo.protocol.ids import BlockId
from octavo.protocol.prefix_hash import HASH_BYTES, SHORT_HASH_BYTES, span_blocks


@dataclass(slots=True)
class _SpanEnd:
    """A block that ends a span before a checkpoint."""

    before: bytes
    """Hash of the end of the span before; b"": it is the first."""
    num_followers: int
    """Checkpoints in the next span, and ends of it."""


class _SpansBeforeStates:
    """The blocks that end a span before at least one checkpoint of a recurrent state: a tree of prefixes.

    Storing or removing a checkpoint takes time for the spans that no other one has, not for the whole prefix.
    """

    def __init__(self, span_blocks: int) -> None:
        self._span_blocks = span_blocks
        self._last_end: dict[bytes, bytes] = {}
        """Of each checkpoint with a span before it, both by hash."""
        self.ends: dict[bytes, _SpanEnd] = {}
        """By hash."""

    def add(self, block_hashes: Sequence[bytes], num_blocks: int) -> list[bytes]:
        """Add the checkpoint after so many of these blocks; returns the ends of spans that only this one has."""
        size = self._span_blocks
        last = num_blocks // size * size - 1
        if last >= 0:
            self._last_end[block_hashes[num_blocks - 1]] = block_hashes[last]
        added = []
        for index in range(last, -1, -size):
            key = block_hashes[index]
            if key in self.ends:
                self.ends[key].num_followers += 1
                break
            self.ends[key] = _SpanEnd(before=block_hashes[index - size] if index >= size else b"", num_followers=1)
            added.append(key)
        return added

    def remove(self, block_hash: bytes) -> list[bytes]:
        """Remove the checkpoint after a block; returns the ends of spans that only this one had."""
        removed = []
        key = self._last_end.pop(block_hash, b"")
        while key:
            end = self.ends[key]
            end.num_followers -= 1
            if end.num_followers:
                break
            del self.ends[key]
            removed.append(key)
            key = end.before
        return removed

    def clear(self) -> None:
        """Remove all checkpoints."""
        self._last_end.clear()
        self.ends.clear()


class CacheChanges:
    """Observes a cache, and keeps the net changes of one group: of several of one block only the last counts.

    The group is the first that keeps every token. If all have windows it is the first one, of which early blocks may be
    gone though a prefix can be found: readers then take it for shorter than it is.

    If no layer has keys and values, a checkpoint of the recurrent state counts as all blocks before it. Its key alone
    does not say which these are, so checkpoints are observed from the construction on.

    Stored blocks are kept only if they end a span, which saves readers most of their work when blocks are small.
    """

    def __init__(self, cache: PrefixCache) -> None:
        groups = cache.groups
        self._cache = cache
        self._span_blocks = span_blocks(groups.block_size)
        self._group = groups.full[0] if groups.full else 0
        self._suffix = groups.key_suffixes[self._group] if groups.num_groups else b""
        self._spans: _SpansBeforeStates | None = None
        """None: there are blocks."""
        self._is_watched = False
        self._changes: dict[bytes, bool] = {}
        """Whether the block can be found now, by its key in the pool."""
        self.has_cleared = False
        """True if all contents were dropped since the last call of `take`; the changes are those after it."""
        if cache.states is not None and not groups.num_groups:
            self._spans = _SpansBeforeStates(self._span_blocks)
            cache.states.add_observer(self)

    def __bool__(self) -> bool:
        return bool(self._changes) or self.has_cleared

    def begin(self) -> None:
        """Keep all changes from now on."""
        self._is_watched = True
        if self._spans is None:
            self._cache.add_observer(self)

    def end(self) -> None:
        """Keep no more changes, and forget those so far."""
        self._is_watched = False
        if self._spans is None:
            self._cache.remove_observer(self)
        self.clear()

    def on_stored(self, request: Request, index: int, group: int) -> None:
        """See `CacheObserver`."""
        if group == self._group and (index + 1) % self._span_blocks == 0:
            self._changes[request.block_hashes[index] + self._suffix] = True

    def on_state_stored(self, request: Request, num_blocks: int, slot: BlockId, *, is_computed: bool) -> None:
        """See `StateObserver`."""
        assert self._spans is not None
        added = self._spans.add(request.block_hashes, num_blocks)
        if self._is_watched:
            self._changes.update(dict.fromkeys(added, True))

    def on_removed(self, block_hash: bytes) -> None:
        """See `ContentObserver`."""
        if self._spans is not None:
            removed = self._spans.remove(block_hash[:HASH_BYTES])
            if self._is_watched:
                self._changes.update(dict.fromkeys(removed, False))
        elif block_hash[HASH_BYTES:] == self._suffix:
            self._changes[block_hash] = False

    def on_cleared(self) -> None:
        """See `ContentObserver`."""
        if self._spans is not None:
            self._spans.clear()
        self._changes.clear()
        self.has_cleared = self._is_watched

    def contents(self) -> list[bytes]:
        """Return the keys of all blocks that can be found now, as far as readers may learn of them."""
        return self._cache.pool.cached_hashes() if self._spans is None else list(self._spans.ends)

    def is_stored(self, key: bytes) -> bool:
        """Return whether one of `contents` can still be found."""
        return self._cache.pool.find(key) is not None if self._spans is None else key in self._spans.ends

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
