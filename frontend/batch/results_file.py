"""`ResultsFile`: the results file, to which complete lines are appended. It knows which requests are done.

A killed process leaves at most one incomplete line, which the next run removes. A lock prevents two processes from
writing to one file.
"""

import fcntl
import os
import stat
from pathlib import Path
from types import TracebackType

import msgspec

from octavo.frontend.batch.lines import BatchResult
from octavo.frontend.cli.errors import CommandError

_REMEDY = "make room, then run the same command again to resume"


class ResultsFile:
    """Results on disk.

    Args:
        path: path of the file; created if missing.
        starts_over: discard existing results.
        remedy: what to do when the disk is full, for the error.

    Raises:
        CommandError: the file cannot be opened, is locked by another process, or has other content.
    """

    def __init__(self, path: Path, *, starts_over: bool = False, remedy: str = _REMEDY) -> None:
        self.path = path
        self._remedy = remedy
        self.done: dict[int, str | None] = {}
        """Custom ids of the lines that have a result, by line number."""
        self.num_failed = 0
        """Number of results with an error."""
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise CommandError(f"cannot write {path}: {error.strerror}", "choose another -o") from None
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise CommandError(f"{path} is not a regular file", "use -o - for standard output")
            self._lock()
            if starts_over:
                os.ftruncate(self._file, 0)
            self._read()
        except BaseException:
            os.close(self._file)
            raise

    def append(self, result: BatchResult) -> None:
        """Append a result. Once this returns, the result survives a crash of this process.

        Raises:
            CommandError: the file cannot be written.
        """
        data = msgspec.json.encode(result) + b"\n"
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise CommandError(f"cannot write {self.path}: {error.strerror}", self._remedy) from None

    def close(self) -> None:
        """Flush to disk and close the file."""
        os.fsync(self._file)
        os.close(self._file)

    def __enter__(self) -> "ResultsFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(f"another process is writing to {self.path}", "choose another -o") from None

    def _read(self) -> None:
        """Read the existing results and remove an incomplete last line."""
        decoder = msgspec.json.Decoder(BatchResult)
        num_good_bytes = 0
        with open(self._file, "rb", closefd=False) as file:
            for number, line in enumerate(file, 1):
                try:
                    result = decoder.decode(line)
                    self.done[result.number] = result.custom_id
                except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
                    if not line.endswith(b"\n"):
                        break
                    raise CommandError(
                        f"line {number} of {self.path} is not a result of a batch", "choose another -o, or --overwrite"
                    ) from None
                self.num_failed += result.error is not None
                num_good_bytes += len(line)
                if not line.endswith(b"\n"):
                    os.write(self._file, b"\n")
                    num_good_bytes += 1
        os.ftruncate(self._file, num_good_bytes)


class StandardOutput:
    """Results on standard output. Cannot be resumed."""

    def __init__(self) -> None:
        self.done: dict[int, str | None] = {}
        self.num_failed = 0

    def append(self, result: BatchResult) -> None:
        """Print a result.

        Raises:
            BrokenPipeError: the reader has exited.
        """
        data = msgspec.json.encode(result) + b"\n"
        while data:
            data = data[os.write(1, data) :]
