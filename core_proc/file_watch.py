"""`FileWatch`: a thread that knows which files of KV blocks there are, and deletes those used least recently.

Several engines may use one directory without locks: each lists it from time to time, and any of them deletes. A file is
there as a whole or not at all, because its writer renames it, and whoever misses one computes instead.
"""

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.protocol.log import LimitedLog

logger = logging.getLogger(__name__)

INTERVAL_S = 30.0
"""Between two lists of the directory, unless listing takes longer than a fiftieth of it."""
SHARE_LEFT = 0.9
"""Share of the limit that is left when files are deleted, so that this is not necessary all the time."""
SHARE_WRITTEN = 0.05
"""After this share of the limit was written, the directory is listed again at once."""
ABANDONED_S = 600.0
"""A file that has not been finished for so long has lost its writer."""

_CONTENT = re.compile(r"[0-9a-f]{16,}")
_UNFINISHED = re.compile(r"\.[0-9a-f]{16,}\..+")
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
        folder: below `root`, the files of this engine: `folder/rank/xx/key`, with key in hexadecimal digits.
        max_bytes: of all files below `root`.
    """

    def __init__(self, root: Path, folder: Path, max_bytes: int) -> None:
        self._root = root
        self._folder = folder
        self._max_bytes = max_bytes
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._changes: list[FileChanges] = []
        self._unwanted: list[bytes] = []
        self._num_written_bytes = 0
        self._is_closed = False
        self._wakes = threading.Event()
        self._known: set[bytes] = set()
        self._log = LimitedLog(logger)
        self._thread = threading.Thread(target=self._run, name="block files", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when `take` has something."""
        return self._fd

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
        """Delete the files of contents, of all ranks, soon."""
        with self._lock:
            self._unwanted += keys
        self._wakes.set()

    def note_written(self, num_bytes: int) -> None:
        """Learn how much the workers have written."""
        self._num_written_bytes += num_bytes
        if self._num_written_bytes > SHARE_WRITTEN * self._max_bytes:
            self._num_written_bytes = 0
            self._wakes.set()

    def close(self) -> None:
        """End the thread. Blocks until: it has listed the directory, if it is doing so."""
        self._is_closed = True
        self._wakes.set()
        self._thread.join()
        os.close(self._fd)

    def _run(self) -> None:
        while not self._is_closed:
            started_s = time.monotonic()
            try:
                self._sweep()
            except OSError as error:
                self._log.warning("cannot list the files of KV blocks in %s: %s", self._root, error)
            self._wakes.wait(max(INTERVAL_S, 50 * (time.monotonic() - started_s)))
            self._wakes.clear()

    def _sweep(self) -> None:
        """Delete what must be deleted, list what is left, and report the difference."""
        with self._lock:
            unwanted, self._unwanted = self._unwanted, []
        for key in unwanted:
            for rank in _subfolders(self._folder):
                _delete(rank / key.hex()[:2] / key.hex())
        files = sorted(_files(self._root))
        excess = sum([size for _, size, _ in files]) - self._max_bytes
        num_deleted = 0
        if excess > 0:
            excess += int((1 - SHARE_LEFT) * self._max_bytes)
        while excess > 0 and num_deleted < len(files):
            _, size, path = files[num_deleted]
            _delete(Path(path))
            excess -= size
            num_deleted += 1
        first = f"{self._folder / '0'}/"
        paths = [path for *_, path in files[num_deleted:] if path.startswith(first)]
        found = {bytes.fromhex(path.rpartition("/")[2]) for path in paths}
        changes = FileChanges(sorted(found - self._known), sorted(self._known - found))
        self._known = found
        if changes.added or changes.removed:
            with self._lock:
                self._changes.append(changes)
            os.eventfd_write(self._fd, 1)


def _files(root: Path) -> Iterator[tuple[float, int, str]]:
    """Yield time of last use, size and path of each file of a content, and delete those without a writer."""
    for folder in (xx for engine in _subfolders(root) for rank in _subfolders(engine) for xx in _subfolders(rank)):
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if _CONTENT.fullmatch(entry.name):
                        status = entry.stat(follow_symlinks=False)
                        yield status.st_mtime, status.st_size, entry.path
                    elif _UNFINISHED.fullmatch(entry.name) and entry.stat().st_mtime < time.time() - ABANDONED_S:
                        _delete(Path(entry.path))


def _subfolders(folder: Path) -> list[Path]:
    """Return the folders in a folder that this module's callers have made; [] if it is not there."""
    try:
        with os.scandir(folder) as entries:
            return [folder / entry.name for entry in entries if _FOLDER.fullmatch(entry.name) and entry.is_dir()]
    except FileNotFoundError:
        return []


def _delete(path: Path) -> None:
    path.unlink(missing_ok=True)
