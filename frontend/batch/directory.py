"""`BatchDirectory`: the files and batches of `--batch-dir` on disk, shared by all HTTP processes. Independent of HTTP.

Records are replaced atomically, so a reader sees the old or the new one. After a batch was created, only the process
that holds the directory's lock writes its record; other processes leave a mark to cancel the batch.
"""

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from octavo.frontend.http.schemas.batches import Batch, FileObject

logger = logging.getLogger(__name__)

FINAL = frozenset({"failed", "completed", "expired", "cancelled"})
"""Final states of a batch."""

KEPT_S = 30 * 24 * 3600
"""Seconds that the record of a batch is kept after its end."""

LEFTOVER_S = 3600.0
"""A file without a record that was not written for this many seconds was left by a process that died."""

_ID = re.compile(r"(file-|batch_)[0-9a-z]{24,40}")


class StoredFile(msgspec.Struct):
    """A file, including fields that are not shown to clients."""

    file: FileObject
    order: int
    """Position in the order of all files."""
    tenant: str | None = None
    """Name of the tenant that owns the file."""


class StoredBatch(msgspec.Struct):
    """A batch, including fields that are not shown to clients."""

    batch: Batch
    order: int
    """Position in the order of all batches."""
    output_expiry_s: int | None = None
    tenant: str | None = None
    """Name of the tenant that owns the batch."""


class DirectoryFullError(Exception):
    """There is no room for a file."""


class BatchDirectory:
    """Files and batches.

    Args:
        path: created if missing; only this user may read it.
        max_bytes: limit of all files together, including results; no file is added beyond it.

    Raises:
        OSError: the directory is not writable, or its file system has no hard links.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._files = path / "files"
        self._batches = path / "batches"
        self.max_bytes = max_bytes
        for directory in (self._files, self._batches):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = self._files / ".writable"
        probe.touch()
        link = self._batches / f"{secrets.token_hex(4)}.new"
        os.link(probe, link)  # as `add_batch` does
        link.unlink()

    def require_room(self, num_bytes: int) -> None:
        """Check that a file of this size may be added; if it may not, remove expired files first.

        Raises:
            DirectoryFullError: the limit of all files would be exceeded.
        """
        if self.num_bytes() + num_bytes > self.max_bytes:
            self.files()
            if self.num_bytes() + num_bytes > self.max_bytes:
                raise DirectoryFullError

    def add_file(
        self, source: BinaryIO, num_bytes: int, filename: str, expiry_s: int | None, tenant: str | None = None
    ) -> FileObject:
        """Add a copy of a file of requests.

        Raises:
            DirectoryFullError: as `require_room`.
            OSError: it cannot be written.
        """
        self.require_room(num_bytes)
        file_id = f"file-{secrets.token_hex(12)}"
        path = self.content_path(file_id)
        try:
            with open(path, "wb", opener=_private) as target:
                shutil.copyfileobj(source, target, 2**20)
            return self.register_file(file_id, filename, "batch", expiry_s, tenant)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def register_file(
        self, file_id: str, filename: str, purpose: str, expiry_s: int | None, tenant: str | None
    ) -> FileObject:
        """Make a file visible whose content is already in place."""
        now = int(time.time())
        file = FileObject(
            id=file_id,
            bytes=self.content_path(file_id).stat().st_size,
            created_at=now,
            expires_at=None if expiry_s is None else now + expiry_s,
            filename=filename,
            purpose="batch" if purpose == "batch" else "batch_output",
        )
        _replace(self._files / f"{file_id}.json", msgspec.json.encode(StoredFile(file, time.time_ns(), tenant)))
        return file

    def file(self, file_id: str) -> StoredFile | None:
        """Return a file. `None` if it does not exist or has expired."""
        if _ID.fullmatch(file_id) is None:
            return None
        stored = _read(self._files / f"{file_id}.json", StoredFile)
        if stored is not None and stored.file.expires_at is not None and stored.file.expires_at <= time.time():
            self.delete_file(file_id)
            return None
        return stored

    def files(self) -> list[StoredFile]:
        """Return all files, oldest first. Expired files are removed."""
        found = [self.file(path.stem) for path in self._files.glob("*.json")]
        return sorted((one for one in found if one is not None), key=lambda one: one.order)

    def content_path(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self._files / f"{file_id}.data"

    def delete_file(self, file_id: str) -> None:
        """Remove a file. Batches that read the file have their own hard link to its content."""
        (self._files / f"{file_id}.json").unlink(missing_ok=True)
        self.content_path(file_id).unlink(missing_ok=True)

    def num_bytes(self) -> int:
        """Return the size in bytes of all files, and of the inputs and results of unfinished batches."""
        sizes: dict[int, int] = {}  # by inode: a hard link takes no space
        for directory in (self._files, self._batches):
            for entry in os.scandir(directory):
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat()
                    sizes[found.st_ino] = found.st_size
        return sum(sizes.values())

    def add_batch(self, stored: StoredBatch) -> None:
        """Store a new batch. It keeps its input when the file is removed or expires.

        Raises:
            FileNotFoundError: the file has just been removed.
            OSError: it cannot be written.
        """
        os.link(self.content_path(stored.batch.input_file_id), self.input_path(stored.batch.id))
        try:
            self.put_batch(stored)
        except BaseException:
            self.clean_up(stored.batch.id)
            raise

    def put_batch(self, stored: StoredBatch) -> None:
        """Write the record of a batch."""
        _replace(self._record(stored.batch.id), msgspec.json.encode(stored))

    def batch(self, batch_id: str) -> StoredBatch | None:
        """Return a batch as clients see it. `None` if there is none."""
        if _ID.fullmatch(batch_id) is None:
            return None
        if (stored := _read(self._record(batch_id), StoredBatch)) is None:
            return None
        since = self.cancelled_at(batch_id)
        if since is not None and stored.batch.status not in FINAL:
            stored.batch.status, stored.batch.cancelling_at = "cancelling", since
        return stored

    def batches(self) -> list[StoredBatch]:
        """Return all batches, oldest first."""
        return self._batches_of(self._batch_ids())

    def unfinished(self, ended: set[str]) -> list[str]:
        """Return the ids of the batches that have not ended, oldest first.

        Args:
            ended: batches already known to have ended, which are skipped; newly found ones are added.
        """
        ids = self._batch_ids()
        ended &= ids
        found = [one.batch.id for one in self._batches_of(ids - ended) if one.batch.status not in FINAL]
        ended |= ids.difference(found)
        return found

    def cancel(self, batch_id: str) -> None:
        """Leave the mark that cancels a batch."""
        self._mark(batch_id).touch()

    def cancelled_at(self, batch_id: str) -> int | None:
        """Return the time (seconds since the epoch) at which a batch was cancelled. `None` if it was not."""
        try:
            return int(self._mark(batch_id).stat().st_mtime)
        except FileNotFoundError:
            return None

    def input_path(self, batch_id: str) -> Path:
        """Return the path of the requests of an unfinished batch."""
        return self._batches / f"{batch_id}.input"

    def results_path(self, batch_id: str) -> Path:
        """Return the path of the results of an unfinished batch."""
        return self._batches / f"{batch_id}.results"

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Try to lock the directory; yield `False` if another process holds the lock. Process exit releases it."""
        file = os.open(self._batches / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            yield False
            return
        try:
            yield True
        finally:
            os.close(file)

    def clean_up(self, batch_id: str) -> None:
        """Remove files that only an unfinished batch needs."""
        for path in (self.input_path(batch_id), self.results_path(batch_id), self._mark(batch_id)):
            path.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove expired files, records of batches that ended long ago, and leftovers of processes that died."""
        now = time.time()
        self.files()
        for stored in self.batches():
            if stored.batch.status in FINAL and _ended_at(stored.batch) + KEPT_S <= now:
                self._record(stored.batch.id).unlink(missing_ok=True)
        leftovers = [*self._files.glob("*.new"), *self._batches.glob("*.new")]
        leftovers += [path for path in self._files.glob("*.data") if not path.with_suffix(".json").exists()]
        leftovers += [path for path in self._batches.glob("*.input") if not path.with_suffix(".json").exists()]
        for path in leftovers:
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ctime + LEFTOVER_S <= now:
                    path.unlink()

    def _batch_ids(self) -> set[str]:
        return {path.stem for path in self._batches.glob("batch_*.json")}

    def _batches_of(self, ids: set[str]) -> list[StoredBatch]:
        found = [self.batch(batch_id) for batch_id in ids]
        return sorted((one for one in found if one is not None), key=lambda one: one.order)

    def _record(self, batch_id: str) -> Path:
        return self._batches / f"{batch_id}.json"

    def _mark(self, batch_id: str) -> Path:
        return self._batches / f"{batch_id}.cancel"


def _ended_at(batch: Batch) -> int:
    times = (batch.failed_at, batch.completed_at, batch.expired_at, batch.cancelled_at)
    return max((time for time in times if time is not None), default=batch.created_at)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


_Record = TypeVar("_Record", StoredFile, StoredBatch)


def _read(path: Path, kind: type[_Record]) -> _Record | None:
    """Return a record. `None` if there is none, or if it is of another version, which is logged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        logger.error("%s is not a record of this version of octavo, and is skipped: %s", path, error)
        return None


def _replace(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves either the old or the new content."""
    temporary = path.with_suffix(f".{secrets.token_hex(4)}.new")
    try:
        with open(temporary, "wb", opener=_private) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
