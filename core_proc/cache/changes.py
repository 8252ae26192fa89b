"""`CacheChanges`: collects changes of the prefix cache for frontends that choose between engines."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core_proc.cache.prefix import PrefixCache
from octavo.core_proc.request import Request
from octavo.protocol.ids import BlockId
from octavo.protocol.prefix_hash import HASH_BYTES, SHORT_HASH_BYTES, short_state_hash, span_blocks


@dataclass(slots=True)
class _SpanEnd:
    """A block that ends a span before a checkpoint."""

    before: bytes
    """Hash of the block that ends the previous span. Empty for the first span."""
    num_followers: int
    """Number of known next spans, plus one if a state lies in the next span."""


class _SpansBeforeStates:
    """The last blocks of the spans that precede cached recurrent states: a tree of prefixes.

    Adding or removing a state costs time only for spans that no other state shares, not for the complete prefix.
    """

    def __init__(self, span_blocks: int) -> None:
        self._span_blocks = span_blocks
        self.ends: dict[bytes, _SpanEnd] = {}
        """Span ends by block hash."""

    def add(self, block_hashes: Sequence[bytes], last: int) -> list[bytes]:
        """Add a state whose last span ends with block `last`. Return the ends of spans that no other state has."""
        size, added = self._span_blocks, []
        for index in range(last, -1, -size):
            key = block_hashes[index]
            if key in self.ends:
                self.ends[key].num_followers += 1
                break
            self.ends[key] = _SpanEnd(before=block_hashes[index - size] if index >= size else b"", num_followers=1)
            added.append(key)
        return added

    def remove(self, key: bytes) -> list[bytes]:
        """Remove a state, given the end of its last span. Return the ends of spans that no other state has."""
        removed = []
        while key:
            end = self.ends[key]
            end.num_followers -= 1
            if end.num_followers:
                break
            del self.ends[key]
            removed.append(key)
            key = end.before
        return removed


class CacheChanges:
    """Observes a cache and collects the net changes of one cache group and of states. Per key, only the last change
    counts.

    The group is the first one that keeps every token. If all groups have windows it is the first group. Early blocks of
    it may be evicted although a prefix can be found; readers then underestimate the length of the prefix.

    A recurrent state is reported as if it followed the last complete span before it. Its key is the hash of the block
    that ends this span, plus the suffix of states. If no layer has KV, all spans before the state count as stored. The
    state's key does not tell which spans these are, so states are observed from construction on.

    Only stored blocks that end a span are collected. With small blocks this saves readers most of their work.
    """

    def __init__(self, cache: PrefixCache) -> None:
        groups = cache.groups
        self._cache = cache
        self._span_blocks = span_blocks(groups.block_size)
        self._group = groups.full[0] if groups.full else 0
        self._suffix = groups.key_suffixes[self._group] if groups.num_groups else b""
        self._state_suffix: bytes | None = None
        """Key suffix of states. None if the model has no states."""
        self.state_interval = 0
        """Tokens between two checkpoints of a request; 0 if there are no checkpoints."""
        self._span_before: dict[bytes, bytes] = {}
        """For each state, the end of the last complete span before it. Both are block hashes."""
        self._num_states: Counter[bytes] = Counter()
        """Number of states by the end of their last span."""
        self._spans: _SpansBeforeStates | None = None
        """Spans before states. None if the cache has blocks."""
        self._is_watched = False
        self._changes: dict[bytes, bool] = {}
        """Whether each changed block or state can be found now, by key."""
        self.has_cleared = False
        """True if all contents were dropped since the last `take`. Then the changes are those after that."""
        if cache.states is not None:
            self._state_suffix = cache.states.key_suffix
            self.state_interval = cache.states.group.interval
            self._spans = None if groups.num_groups else _SpansBeforeStates(self._span_blocks)
            cache.states.add_observer(self)

    def __bool__(self) -> bool:
        return bool(self._changes) or self.has_cleared

    def begin(self) -> None:
        """Start to collect changes."""
        self._is_watched = True
        if self._spans is None:
            self._cache.add_observer(self)

    def end(self) -> None:
        """Stop collecting changes, and discard the collected ones."""
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
        assert self._state_suffix is not None
        last = num_blocks // self._span_blocks * self._span_blocks - 1
        if last < 0:
            return
        end = self._span_before[request.block_hashes[num_blocks - 1]] = request.block_hashes[last]
        self._num_states[end] += 1
        if self._num_states[end] > 1:
            return
        added = [] if self._spans is None else self._spans.add(request.block_hashes, last)
        if self._is_watched:
            self._changes.update(dict.fromkeys([*added, end + self._state_suffix], True))

    def on_removed(self, block_hash: bytes) -> None:
        """See `ContentObserver`."""
        suffix = block_hash[HASH_BYTES:]
        if suffix == self._state_suffix:
            self._remove_state(block_hash[:HASH_BYTES])
        elif suffix == self._suffix:
            self._changes[block_hash] = False

    def _remove_state(self, block_hash: bytes) -> None:
        """Note that the state after a block can no longer be found."""
        assert self._state_suffix is not None
        if not (end := self._span_before.pop(block_hash, b"")):
            return
        self._num_states[end] -= 1
        if self._num_states[end]:
            return
        del self._num_states[end]
        removed = [] if self._spans is None else self._spans.remove(end)
        if self._is_watched:
            self._changes.update(dict.fromkeys([*removed, end + self._state_suffix], False))

    def on_cleared(self) -> None:
        """See `ContentObserver`. Blocks and states are cleared together."""
        self._span_before.clear()
        self._num_states.clear()
        if self._spans is not None:
            self._spans.ends.clear()
        self._changes.clear()
        self.has_cleared = self._is_watched

    def contents(self) -> list[bytes]:
        """Return the keys of all blocks and states that can be found now and are reported to readers."""
        blocks = self._cache.pool.cached_hashes() if self._spans is None else list(self._spans.ends)
        return (
            blocks if self._state_suffix is None else [*blocks, *(end + self._state_suffix for end in self._num_states)]
        )

    def is_stored(self, key: bytes) -> bool:
        """Return whether a key returned by `contents` can still be found."""
        if key[HASH_BYTES:] == self._state_suffix:
            return key[:HASH_BYTES] in self._num_states
        return self._cache.pool.find(key) is not None if self._spans is None else key in self._spans.ends

    def take(self) -> tuple[bytes, bytes]:
        """Return the short hashes of what was stored and removed since the last call."""
        changes = self._changes
        self.clear()
        stored = [key for key, is_stored in changes.items() if is_stored]
        removed = [key for key, is_stored in changes.items() if not is_stored]
        return self.short_hashes(stored), self.short_hashes(removed)

    def clear(self) -> None:
        """Discard all collected changes."""
        self._changes = {}
        self.has_cleared = False

    def short_hashes(self, keys: list[bytes]) -> bytes:
        """Return the concatenated short hashes of those keys that are reported to readers."""
        short = []
        for key in keys:
            suffix = key[HASH_BYTES:]
            if suffix == self._suffix:
                short.append(key[:SHORT_HASH_BYTES])
            elif suffix == self._state_suffix:
                short.append(short_state_hash(key))
        return b"".join(short)
