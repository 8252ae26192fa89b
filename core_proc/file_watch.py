"""`FileWatch`: a thread that tracks which blocks are in pack files, and deletes the least recently used packs.

Several engines can share a directory without locks: each one lists it periodically, and each one may delete files. A
pack appears atomically, because its writer renames it. An engine that misses a deleted pack recomputes its blocks.
"""

import contextlib
import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.protocol.block_packs import PACK_NAME, UNFINISHED_NAME, DamagedPack, pack_path, read_header_of
from octavo.protocol.log import LimitedLog

logger = logging.getLogger(__name__)

INTERVAL_S = 30.0
"""Seconds between two lists of the directory, or 50 times the duration of a list if that is longer."""
SHARE_LEFT = 0.9
"""Fraction of the size limit that is left after a deletion, so that not every list must delete files."""
SHARE_WRITTEN = 0.05
"""The directory is listed at once after this fraction of the size limit was written."""
FIRST_LIST_S = 10.0
"""Most seconds that a starting engine waits for the first list of files."""
RESTART_LIST_S = 1.0
"""Most seconds that a core that replaces a crashed one waits for the first list. Its streams stall meanwhile."""
RETRY_S = 1.0
"""Used instead of `INTERVAL_S` after a failed attempt to list the directory or to delete files."""
ABANDONED_S = 600.0
"""An unfinished file of this age in seconds has lost its writer."""

_FOLDER = re.compile(r"[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class FileChanges:
    """Differences from the previous list: block keys."""

    added: list[bytes]
    removed: list[bytes]


class FileWatch:
    """Lists the files below a directory and limits their total size.

    Args:
        root: directory of all files, for all models; other files in it are not touched.
        folder: the folder of this engine's packs below `root`; see `octavo.protocol.block_packs`.
        max_bytes: limit for all files below `root`.
    """

    def __init__(self, root: Path, folder: Path, max_bytes: int) -> None:
        self._root = root
        self._folder = folder
        self._max_bytes = max_bytes
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._changes: list[FileChanges] = []
        self._unwanted: set[bytes] = set()
        self._num_written_bytes = 0
        self._is_closed = False
        self._wakes = threading.Event()
        self._has_listed = threading.Event()
        self._packs: dict[str, tuple[bytes, ...]] = {}
        """Keys in each pack of the first rank. Other ranks write the same keys."""
        self._known: set[bytes] = set()
        """Keys that `take` has reported."""
        self._reported: set[str] = set()
        """Packs that contain these keys."""
        self._log = LimitedLog(logger)
        self._thread = threading.Thread(target=self._run, name="block files", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when `take` has changes."""
        return self._fd

    def wait_listed(self, timeout_s: float) -> bool:
        """Return whether the directory was listed once. Blocks until: the first list is complete, or the timeout."""
        return self._has_listed.wait(timeout_s)

    def take(self) -> list[FileChanges]:
        """Return the changes since the last call. Never blocks."""
        if not self._changes:  # perf: called after each step
            return []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        with self._lock:
            changes, self._changes = self._changes, []
        return changes

    def delete(self, keys: Sequence[bytes]) -> None:
        """Schedule the deletion of the packs that contain these keys, for all ranks."""
        with self._lock:
            self._unwanted.update(keys)
        self._wakes.set()

    def list_soon(self) -> None:
        """List the directory now. If a list is in progress, list it again afterwards: new files may have appeared
        meanwhile."""
        self._wakes.set()

    def note_written(self, num_bytes: int) -> None:
        """Count the bytes that the workers have written."""
        self._num_written_bytes += num_bytes
        if self._num_written_bytes > SHARE_WRITTEN * self._max_bytes:
            self._num_written_bytes = 0
            self._wakes.set()

    def close(self) -> None:
        """End the thread. Blocks until: the thread has handled the current file, if a list is in progress."""
        self._is_closed = True
        self._wakes.set()
        self._thread.join()
        os.close(self._fd)

    def _run(self) -> None:
        while not self._is_closed:
            started_s = time.monotonic()
            with self._lock:
                unwanted, self._unwanted = self._unwanted, set()
            try:
                unwanted = self._sweep(unwanted)
                pause_s = RETRY_S if unwanted else INTERVAL_S
            except OSError as error:
                self._log.warning("cannot list the files of KV blocks in %s: %s", self._root, error)
                pause_s = RETRY_S
            with self._lock:
                self._unwanted.update(unwanted)
            self._has_listed.set()
            self._wakes.wait(max(pause_s, 50 * (time.monotonic() - started_s)))
            self._wakes.clear()

    def _sweep(self, unwanted: set[bytes]) -> set[bytes]:
        """Delete what must be deleted, list the remaining files, and report the differences.

        Returns:
            The keys of `unwanted` that could not be deleted. They are not reported as found.

        Raises:
            OSError: the directory cannot be listed. Only files have changed by then.
        """
        files = sorted(itertools.takewhile(lambda _: not self._is_closed, self._files()))
        if self._is_closed:
            return unwanted
        paths = self._delete_excess(files)
        self._update_packs([path for path in paths if path.startswith(f"{self._folder / '0'}/")])
        kept = self._delete_packs_with(unwanted)
        # perf: a union of many keys would hold the GIL
        if self._is_closed or (not unwanted and self._packs.keys() == self._reported):
            return kept
        found = set().union(*self._packs.values()) - kept
        changes = FileChanges(sorted(found - self._known), sorted(self._known - found))
        self._known, self._reported = found, set(self._packs)
        if changes.added or changes.removed:
            with self._lock:
                self._changes.append(changes)
            os.eventfd_write(self._fd, 1)
        return kept

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Yield last use, size and path of each pack, and delete unfinished files without a writer."""
        oldest_s = time.time() - ABANDONED_S
        ranks = (rank for engine in _subfolders(self._root) for rank in _subfolders(engine))
        for folder in (xx for rank in ranks for xx in _subfolders(rank)):
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        if PACK_NAME.fullmatch(entry.name):
                            status = entry.stat(follow_symlinks=False)
                            yield status.st_mtime, status.st_size, entry.path
                        elif UNFINISHED_NAME.fullmatch(entry.name) and entry.stat().st_mtime < oldest_s:
                            self._delete(entry.path)

    def _delete_excess(self, files: Sequence[tuple[float, int, str]]) -> list[str]:
        """Delete the first files if the total size exceeds the limit. Return the paths of the remaining ones."""
        excess = sum([size for _, size, _ in files]) - self._max_bytes
        if excess > 0:
            excess += int((1 - SHARE_LEFT) * self._max_bytes)
        paths = []
        for _, size, path in files:
            if excess > 0 and self._delete(path):
                excess -= size
            else:
                paths.append(path)
        return paths

    def _update_packs(self, paths: Sequence[str]) -> None:
        """Read the headers of new packs and forget deleted packs."""
        found = {os.path.basename(path): path for path in paths}
        for name in self._packs.keys() - found.keys():
            del self._packs[name]
        for name in found.keys() - self._packs.keys():
            if self._is_closed:
                break
            try:
                self._packs[name] = read_header_of(Path(found[name])).keys
            except DamagedPack as error:
                if self._delete(found[name]):
                    self._log.warning("deleted %s, a damaged file of KV blocks: %s", found[name], error)
            except FileNotFoundError:
                pass  # another engine has deleted it
            except OSError as error:
                self._log.warning("cannot read %s, a file of KV blocks: %s", found[name], error)

    def _delete_packs_with(self, keys: set[bytes]) -> set[bytes]:
        """Delete the packs that contain these keys, for all ranks. Return the keys that could not be deleted."""
        kept: set[bytes] = set()
        for name in [name for name, own in self._packs.items() if not keys.isdisjoint(own)]:
            if self._delete_pack(name):
                del self._packs[name]
            else:
                kept |= keys.intersection(self._packs[name])
        return kept

    def _delete_pack(self, name: str) -> bool:
        """Delete a pack of all ranks. Return whether none of its files is left."""
        try:
            ranks = sorted(_subfolders(self._folder), reverse=True)
        except OSError as error:
            self._log.warning("cannot list the files of KV blocks in %s: %s", self._folder, error)
            return False
        # Only the first rank's pack is listed, so it is deleted last: an incomplete deletion is found again.
        return all(self._delete(str(pack_path(rank, name))) for rank in ranks)

    def _delete(self, path: str) -> bool:
        """Delete a file. Return whether it is gone."""
        try:
            Path(path).unlink(missing_ok=True)
        except OSError as error:
            self._log.warning("cannot delete %s, a file of KV blocks: %s", path, error)
            return False
        return True


def _subfolders(folder: Path) -> list[Path]:
    """Return the subfolders that this module's callers have created. Empty if the folder does not exist."""
    try:
        with os.scandir(folder) as entries:
            return [folder / entry.name for entry in entries if _FOLDER.fullmatch(entry.name) and entry.is_dir()]
    except FileNotFoundError:
        return []
