"""`FileTier`: which contents of blocks files have. Reads no file: see `octavo.core_proc.file_store`."""

from collections import OrderedDict
from collections.abc import Iterable, Set

MAX_CONTENTS = 1 << 20
"""The most keys of contents in files that the core knows: about 200 MB."""


class FileTier:
    """The keys of contents that the workers may find in files, or by way of a connector.

    Files may vanish at any time, because other engines use the same directory. A load that does not find one says so.

    Args:
        max_contents: the most keys. The one that was added first makes place: its content is found again when a
            connector is asked, and written again otherwise.
    """

    def __init__(self, max_contents: int = MAX_CONTENTS) -> None:
        self.has_watched_changed = False
        """True once a watched content was dropped or added."""
        self.is_open = True
        """False once the weights have changed: the files are for those of the start."""
        self.discarded: list[bytes] = []
        """Contents whose files must not be read any more, and are to be deleted."""
        self.num_storing = 0
        """Blocks that workers write to files now."""
        self._watched: Set[bytes] = frozenset()
        self._max_contents = max_contents
        self._keys: OrderedDict[bytes, None] = OrderedDict()

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
            for key in removed:
                self._keys.pop(key, None)
            for key in added:
                self._keys[key] = None
                self._keys.move_to_end(key)
            while len(self._keys) > self._max_contents:
                self._keys.popitem(last=False)
            self.has_watched_changed = True

    def discard(self, key: bytes) -> None:
        """Have the file of a content deleted, if there is one."""
        self._keys.pop(key, None)
        self.discarded.append(key)
        self.has_watched_changed = True

    def close(self) -> None:
        """Find nothing from now on."""
        self._keys.clear()
        self.is_open = False
        self.has_watched_changed = True
