"""`CacheChanges`: what has changed in the prefix cache since the last look, for frontends that choose engines."""

from octavo.core_proc.cache.groups import CacheGroups
from octavo.core_proc.request import Request
from octavo.protocol.prefix_hash import HASH_BYTES, SHORT_HASH_BYTES, span_blocks


class CacheChanges:
    """A `CacheObserver` that keeps the net changes of one group: of several of one block only the last counts.

    The group is the first that keeps every token. If all have windows it is the first one, of which early blocks may be
    gone though a prefix can be found: readers then take it for shorter than it is.

    Stored blocks are kept only if they end a span, which saves readers most of their work when blocks are small.
    """

    def __init__(self, groups: CacheGroups) -> None:
        self._span_blocks = span_blocks(groups.block_size)
        self._group = groups.full[0] if groups.full else 0
        self._suffix = groups.key_suffixes[self._group] if groups.num_groups else b""
        self._changes: dict[bytes, bool] = {}
        """Whether the block can be found now, by its key in the pool."""
        self.has_cleared = False
        """True if all contents were dropped since the last call of `take`; the changes are those after it."""

    def __bool__(self) -> bool:
        return bool(self._changes) or self.has_cleared

    def on_stored(self, request: Request, index: int, group: int) -> None:
        """See `CacheObserver`."""
        if group == self._group and (index + 1) % self._span_blocks == 0:
            self._changes[request.block_hashes[index] + self._suffix] = True

    def on_removed(self, block_hash: bytes) -> None:
        """See `ContentObserver`."""
        if block_hash[HASH_BYTES:] == self._suffix:
            self._changes[block_hash] = False

    def on_cleared(self) -> None:
        """See `ContentObserver`."""
        self._changes.clear()
        self.has_cleared = True

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
