"""`FileTier`: tracks which blocks are stored in files. Reads no file: see `octavo.core_proc.file_store`."""

from collections import OrderedDict
from collections.abc import Iterable, Set

MAX_CONTENTS = 1 << 20
"""Most keys of stored blocks that the core tracks: about 200 MB of memory."""


class FileTier:
    """Keys of blocks that the workers can load from files or through a connector.

    Files may disappear at any time, because other engines use the same directory. A load reports files that it cannot
    find.

    Args:
        max_contents: most keys. The oldest key is evicted to make room. A connector is asked again for an evicted key;
            a file is written again.
    """

    def __init__(self, max_contents: int = MAX_CONTENTS) -> None:
        self.has_watched_changed = False
        """True after a watched key was added or removed."""
        self.is_open = True
        """False after the weights have changed: the files belong to the initial weights."""
        self.discarded: list[bytes] = []
        """Keys whose files must not be read any more and must be deleted."""
        self.num_storing = 0
        """Number of blocks that workers are writing to files now."""
        self._watched: Set[bytes] = frozenset()
        self._max_contents = max_contents
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def watch(self, keys: Set[bytes]) -> None:
        """Watch only these keys from now on; see `has_watched_changed`."""
        self._watched = keys
        self.has_watched_changed = False

    def change(self, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Note which keys were added to and removed from the files."""
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
        """Have the file with a key deleted, if there is one."""
        self._keys.pop(key, None)
        self.discarded.append(key)
        self.has_watched_changed = True

    def close(self) -> None:
        """Find nothing from now on."""
        self._keys.clear()
        self.is_open = False
        self.has_watched_changed = True
