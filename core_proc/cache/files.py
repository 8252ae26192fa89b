"""`FileTier`: which contents of blocks files have. Reads no file: see `octavo.core_proc.file_store`."""

from collections.abc import Iterable, Set


class FileTier:
    """The keys of contents that the workers may find in files.

    Files may vanish at any time, because other engines use the same directory. A load that does not find one says so.
    """

    def __init__(self) -> None:
        self.has_watched_changed = False
        """True once a watched content was dropped or added."""
        self.is_open = True
        """False once the weights have changed: the files are for those of the start."""
        self.discarded: list[bytes] = []
        """Contents whose files must not be read any more, and are to be deleted."""
        self.num_storing = 0
        """Blocks that workers write to files now."""
        self._watched: Set[bytes] = frozenset()
        self._keys: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def watch(self, keys: Set[bytes]) -> None:
        """Watch these contents, and no others from now on: see `has_watched_changed`."""
        self._watched = keys
        self.has_watched_changed = False

    def change(self, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Note which files there are now, and which there are no more."""
        if self.is_open:
            self._keys.update(added)
            self._keys.difference_update(removed)
            self.has_watched_changed = True

    def discard(self, key: bytes) -> None:
        """Have the file of a content deleted, if there is one."""
        self._keys.discard(key)
        self.discarded.append(key)
        self.has_watched_changed = True

    def close(self) -> None:
        """Find nothing from now on."""
        self._keys.clear()
        self.is_open = False
        self.has_watched_changed = True
