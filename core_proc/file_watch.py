"""`FileWatch`: a thread that knows which contents the pack files have, and deletes those used least recently.

Several engines may use one directory without locks: each lists it from time to time, and any of them deletes. A pack is
there as a whole or not at all, because its writer renames it, and whoever misses one computes instead.
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
"""Between two lists of the directory, unless listing takes longer than a fiftieth of it."""
SHARE_LEFT = 0.9
"""Share of the limit that is left when files are deleted, so that this is not necessary all the time."""
SHARE_WRITTEN = 0.05
"""After this share of the limit was written, the directory is listed again at once."""
FIRST_LIST_S = 10.0
"""An engine that starts waits at most so long until it knows the files."""
RESTART_LIST_S = 1.0
"""A core that replaces a crashed one waits at most so long: its streams stand still meanwhile."""
RETRY_S = 1.0
"""In place of `INTERVAL_S` after a failed attempt to list the directory, or to delete contents."""
ABANDONED_S = 600.0
"""A file that has not been finished for so long has lost its writer."""

_FOLDER = re.compile(r"[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class FileChanges:
    """What differs from the list before: contents by key."""

    added: list[bytes]
    removed: list[bytes]


class FileWatch:
    """Lists the files below a directory, and keeps them below a size.

    Args:
        root: of all files, of any model; nothing else in it is touched.
        folder: below `root`, the packs of this engine: see `octavo.protocol.block_packs`.
        max_bytes: of all files below `root`.
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
        """The keys in each pack of the first rank. Other ranks write the same ones."""
        self._known: set[bytes] = set()
        """The keys that `take` has reported."""
        self._reported: set[str] = set()
        """The packs that have these keys."""
        self._log = LimitedLog(logger)
        self._thread = threading.Thread(target=self._run, name="block files", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when `take` has something."""
        return self._fd

    def wait_listed(self, timeout_s: float) -> bool:
        """Return whether the directory has been listed once. Blocks until: it has been, or the timeout."""
        return self._has_listed.wait(timeout_s)

    def take(self) -> list[FileChanges]:
        """Return what has changed since the last call. Never blocks."""
        if not self._changes:  # perf: called after each step
            return []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        with self._lock:
            changes, self._changes = self._changes, []
        return changes

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete the packs that have these contents, of all ranks, soon."""
        with self._lock:
            self._unwanted.update(keys)
        self._wakes.set()

    def list_soon(self) -> None:
        """List the directory now, or once more if it is being listed: files may have come of which nobody knows."""
        self._wakes.set()

    def note_written(self, num_bytes: int) -> None:
        """Learn how much the workers have written."""
        self._num_written_bytes += num_bytes
        if self._num_written_bytes > SHARE_WRITTEN * self._max_bytes:
            self._num_written_bytes = 0
            self._wakes.set()

    def close(self) -> None:
        """End the thread. Blocks until: the next file of the directory, if it is being listed."""
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
        """Delete what must be deleted, list what is left, and report the difference.

        Returns:
            What of `unwanted` could not be deleted: it is not reported as found.

        Raises:
            OSError: the directory cannot be listed; nothing has changed but the files.
        """
        files = sorted(itertools.takewhile(lambda _: not self._is_closed, self._files()))
        if self._is_closed:
            return unwanted
        paths = self._delete_excess(files)
        self._update_packs([path for path in paths if path.startswith(f"{self._folder / '0'}/")])
        kept = self._delete_packs_with(unwanted)
        # perf: a union of many keys holds the GIL
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
        """Yield time of last use, size and path of each pack, and delete unfinished ones without a writer."""
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
        """Delete the first files if all together exceed the limit; returns the paths of the others."""
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
        """Read the headers of packs that are new, and forget those that are gone."""
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
        """Delete the packs of all ranks that have one of these contents; returns those that could not be deleted."""
        kept: set[bytes] = set()
        for name in [name for name, own in self._packs.items() if not keys.isdisjoint(own)]:
            if self._delete_pack(name):
                del self._packs[name]
            else:
                kept |= keys.intersection(self._packs[name])
        return kept

    def _delete_pack(self, name: str) -> bool:
        """Delete a pack of all ranks; returns whether none is left."""
        try:
            ranks = sorted(_subfolders(self._folder), reverse=True)
        except OSError as error:
            self._log.warning("cannot list the files of KV blocks in %s: %s", self._folder, error)
            return False
        # The first rank's pack, which is the one that is listed, goes last: what is left is found again.
        return all(self._delete(str(pack_path(rank, name))) for rank in ranks)

    def _delete(self, path: str) -> bool:
        """Delete a file; returns whether it is gone."""
        try:
            Path(path).unlink(missing_ok=True)
        except OSError as error:
            self._log.warning("cannot delete %s, a file of KV blocks: %s", path, error)
            return False
        return True


def _subfolders(folder: Path) -> list[Path]:
    """Return the folders in a folder that this module's callers have made; [] if it is not there."""
    try:
        with os.scandir(folder) as entries:
            return [folder / entry.name for entry in entries if _FOLDER.fullmatch(entry.name) and entry.is_dir()]
    except FileNotFoundError:
        return []
