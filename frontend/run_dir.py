"""The private directory of one engine, with its sockets and its pulse file.

A directory is never reused, so a dead engine's sockets cannot prevent the next start. The next engine removes the
directories of killed engines. A lock on a file inside shows that the owner is alive: the kernel releases the lock when
the process ends.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "octavo-"
_LOCK = "owner.lock"


class RunDir:
    """A fresh 0700 directory, held by this process until `remove()`."""

    def __init__(self, parent: Path) -> None:
        sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # Lock before giving it the name that `sweep` looks for: a concurrent sweep must not find it unlocked.
        unnamed = self.path / "new"
        self._lock_fd = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        unnamed.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Delete the directory. Idempotent."""
        if self._lock_fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock_fd)
            self._lock_fd = -1


def sweep(parent: Path) -> None:
    """Delete the directories of this user's engines that are no longer alive."""
    for path in parent.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):  # owned by another user, in use, or swept concurrently
            fd = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)
