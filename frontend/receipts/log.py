"""`ReceiptLog`: writes receipts as JSON lines to a directory of bounded size, on a thread of its own."""

import contextlib
import itertools
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from octavo.frontend.receipts.receipt import LOG_FILES, Record

logger = logging.getLogger(__name__)

FILES_PER_LOG = 16
"""The log is removed file by file. More files keep its size closer to the limit."""

MAX_WAITING_BYTES = 64 * 2**20
"""Maximum number of bytes of receipts that are not written yet; further receipts are lost."""

_BYTES_PER_TOKEN = 16
"""Approximate number of bytes of a line per token: its id and the digest of its logprobs."""


class ReceiptLog:
    """Appends records to files, and removes the oldest files.

    Several logs, of one or many processes, may write to one directory: each writes files of its own and removes the
    oldest of all. Responses never wait for a write, and a failed write loses only its receipt.

    Args:
        directory: must exist.
        max_bytes: limit of all files together. A log does not remove the file that it writes to, so the total may
            exceed the limit by one file (a sixteenth) per log.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._file_bytes = max(1, max_bytes // FILES_PER_LOG)
        # The thread starts with the first receipt. At exit, the interpreter waits until all receipts are written.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="receipts")
        self._lock = threading.Lock()
        self._num_waiting_bytes = 0
        self._numbers = itertools.count(1)
        self._fd = -1
        self._size = 0
        self._num_lost = 0
        """Number of records lost since the last one that was written."""

    def write(self, record: Record) -> None:
        """Schedule a record to be written; return at once."""
        num_tokens = sum([len(one.token_ids) for prompt in record.receipt.prompts for one in prompt.sequences])
        num_bytes = len(bytes(record.request)) + _BYTES_PER_TOKEN * num_tokens
        with self._lock:
            is_full = self._num_waiting_bytes > MAX_WAITING_BYTES
            if not is_full:
                self._num_waiting_bytes += num_bytes
        if is_full:
            self._lose(f"{MAX_WAITING_BYTES} bytes of receipts wait for the disk")
        else:
            self._thread.submit(self._write, record, num_bytes)

    def _write(self, record: Record, num_bytes: int) -> None:
        try:
            self._append(msgspec.json.encode(record) + b"\n")
        except OSError as error:
            self._lose(error.strerror or str(error))
        else:
            with self._lock:
                num_lost, self._num_lost = self._num_lost, 0
            if num_lost:
                logger.warning("receipts are written to %s again; %d were lost", self._directory, num_lost)
        finally:
            with self._lock:
                self._num_waiting_bytes -= num_bytes

    def _lose(self, reason: str) -> None:
        with self._lock:
            self._num_lost += 1
            is_first = self._num_lost == 1
        if is_first:  # log once per outage, not for each response
            logger.error("receipts are lost, responses are not: cannot write to %s: %s", self._directory, reason)

    def _append(self, line: bytes) -> None:
        is_full = bool(self._size) and self._size + len(line) > self._file_bytes
        # The file of a quiet process may be the oldest one and be removed by another process.
        if self._fd < 0 or is_full or not os.fstat(self._fd).st_nlink:
            self._begin_file()
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)  # leave no incomplete line
            raise
        self._size += len(line)

    def _begin_file(self) -> None:
        path, fd = self._create_file()
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._size = fd, 0
        self._remove_oldest(path)

    def _create_file(self) -> tuple[Path, int]:
        """Create a file with an unused name; return its path and descriptor."""
        start = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        while True:
            path = self._directory / f"receipts-{start}-{os.getpid()}-{next(self._numbers):04}.jsonl"
            # Another log of this process, or a process with this id in another container, may have the name.
            with contextlib.suppress(FileExistsError):
                # Only this user may read the requests of others.
                return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _remove_oldest(self, own: Path) -> None:
        """Make room for a complete file."""
        found: list[tuple[float, int, Path]] = []
        for path in self._directory.glob(LOG_FILES):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        total = sum([size for _, size, _ in found]) + self._file_bytes
        for _, size, path in sorted(found):
            if total <= self._max_bytes:
                return
            if path != own:
                path.unlink(missing_ok=True)
                total -= size
