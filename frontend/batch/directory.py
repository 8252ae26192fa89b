"""`BatchDirectory`: the files and batches of `--batch-dir` on disk, for all HTTP processes of a server. Knows no HTTP.

A record is replaced as a whole, so a reader sees the old one or the new one. Only the process that holds a batch's lock
writes its record after it was created; others leave a mark to cancel it.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from octavo.frontend.http.schemas.batches import Batch, FileObject

FINAL = frozenset({"failed", "completed", "expired", "cancelled"})
"""States of a batch that nobody works on any more."""

_ID = re.compile(r"(file-|batch_)[0-9a-z]{24,40}")


class StoredFile(msgspec.Struct):
    """A file, and its place in the order of all files."""

    file: FileObject
    order: int


class StoredBatch(msgspec.Struct):
    """A batch, and what its answers do not show."""

    batch: Batch
    order: int
    output_expiry_s: int | None = None


class DirectoryFullError(Exception):
    """There is no room for a file."""


class BatchDirectory:
    """Files and batches.

    Args:
        path: made if it is missing; only this user may read it.
        max_bytes: of all files together, results included; no file is added beyond it.

    Raises:
        OSError: it cannot be written to.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._files = path / "files"
        self._batches = path / "batches"
        self.max_bytes = max_bytes
        for directory in (self._files, self._batches):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self._files / ".writable").touch()

    def add_file(self, source: BinaryIO, num_bytes: int, filename: str, expiry_s: int | None) -> FileObject:
        """Copy a file of requests.

        Raises:
            DirectoryFullError: the limit on all files would be exceeded.
            OSError: it cannot be written.
        """
        if self.num_bytes() + num_bytes > self.max_bytes:
            raise DirectoryFullError
        file_id = f"file-{secrets.token_hex(12)}"
        path = self.content_path(file_id)
        with open(path, "wb", opener=_private) as target:
            shutil.copyfileobj(source, target, 2**20)
        return self.register_file(file_id, filename, "batch", expiry_s)

    def register_file(self, file_id: str, filename: str, purpose: str, expiry_s: int | None) -> FileObject:
        """Make a file visible whose content is already at its place."""
        now = int(time.time())
        file = FileObject(
            id=file_id,
            bytes=self.content_path(file_id).stat().st_size,
            created_at=now,
            expires_at=None if expiry_s is None else now + expiry_s,
            filename=filename,
            purpose="batch" if purpose == "batch" else "batch_output",
        )
        _replace(self._files / f"{file_id}.json", msgspec.json.encode(StoredFile(file, time.time_ns())))
        return file

    def file(self, file_id: str) -> FileObject | None:
        """Return a file, None if there is none or it has expired."""
        found = self._stored_file(file_id)
        return None if found is None else found.file

    def files(self) -> list[FileObject]:
        """Return all files, oldest first. Those that have expired are removed."""
        found = [self._stored_file(path.stem) for path in self._files.glob("*.json")]
        return [one.file for one in sorted((one for one in found if one is not None), key=lambda one: one.order)]

    def content_path(self, file_id: str) -> Path:
        """Return where the content of a file is."""
        return self._files / f"{file_id}.data"

    def delete_file(self, file_id: str) -> None:
        """Remove a file."""
        (self._files / f"{file_id}.json").unlink(missing_ok=True)
        self.content_path(file_id).unlink(missing_ok=True)

    def num_bytes(self) -> int:
        """Return the size of all files, and of the results of unfinished batches."""
        total = 0
        for directory in (self._files, self._batches):
            for entry in os.scandir(directory):
                with contextlib.suppress(FileNotFoundError):
                    total += entry.stat().st_size
        return total

    def put_batch(self, stored: StoredBatch) -> None:
        """Write the record of a batch."""
        _replace(self._record(stored.batch.id), msgspec.json.encode(stored))

    def batch(self, batch_id: str) -> StoredBatch | None:
        """Return a batch as clients see it, None if there is none."""
        if _ID.fullmatch(batch_id) is None:
            return None
        try:
            stored = msgspec.json.decode(self._record(batch_id).read_bytes(), type=StoredBatch)
        except FileNotFoundError:
            return None
        since = self.cancelled_at(batch_id)
        if since is not None and stored.batch.status not in FINAL:
            stored.batch.status, stored.batch.cancelling_at = "cancelling", since
        return stored

    def batches(self) -> list[StoredBatch]:
        """Return all batches, oldest first."""
        found = [self.batch(path.stem) for path in self._batches.glob("batch_*.json")]
        return sorted((one for one in found if one is not None), key=lambda one: one.order)

    def cancel(self, batch_id: str) -> None:
        """Leave the mark that cancels a batch."""
        self._mark(batch_id).touch()

    def cancelled_at(self, batch_id: str) -> int | None:
        """Return when a batch was cancelled, None if it was not."""
        try:
            return int(self._mark(batch_id).stat().st_mtime)
        except FileNotFoundError:
            return None

    def results_path(self, batch_id: str) -> Path:
        """Return where the results of an unfinished batch are."""
        return self._batches / f"{batch_id}.results"

    @contextlib.contextmanager
    def lock(self, batch_id: str) -> Iterator[bool]:
        """Hold the lock of a batch; yields False if another process has it. The end of a process releases it."""
        file = os.open(self._batches / f"{batch_id}.lock", os.O_RDWR | os.O_CREAT, 0o600)
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
        """Remove what only an unfinished batch needs."""
        for path in (self.results_path(batch_id), self._mark(batch_id), self._batches / f"{batch_id}.lock"):
            path.unlink(missing_ok=True)

    def _stored_file(self, file_id: str) -> StoredFile | None:
        if _ID.fullmatch(file_id) is None:
            return None
        try:
            stored = msgspec.json.decode((self._files / f"{file_id}.json").read_bytes(), type=StoredFile)
        except FileNotFoundError:
            return None
        if stored.file.expires_at is not None and stored.file.expires_at <= time.time():
            self.delete_file(file_id)
            return None
        return stored

    def _record(self, batch_id: str) -> Path:
        return self._batches / f"{batch_id}.json"

    def _mark(self, batch_id: str) -> Path:
        return self._batches / f"{batch_id}.cancel"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _replace(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves the old content or the new one."""
    temporary = path.with_suffix(f".{secrets.token_hex(4)}.new")
    with open(temporary, "wb", opener=_private) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
