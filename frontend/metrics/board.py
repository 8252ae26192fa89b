"""`Board`: numbers that several processes count, one row for each, in memory that all of them see.

A process writes its own row and nobody waits: a sum over the rows is what all have counted, those that have died
included. Knows nothing of what a number means.
"""

import mmap
from collections.abc import Sequence
from pathlib import Path

NUM_COLUMNS = 2048
_NUM_ROW_BYTES = 8 * NUM_COLUMNS


class Cells:
    """Some columns of a board.

    Args:
        own: of this process's row.
        rows: of every row.
    """

    __slots__ = ("_rows", "own")

    def __init__(self, own: "memoryview[float]", rows: Sequence["memoryview[float]"]) -> None:
        self.own = own
        """To be written; a number is written at once or not at all."""
        self._rows = rows

    def sums(self) -> list[float]:
        """Return what all processes have counted, by column."""
        return [sum(column) for column in zip(*self._rows, strict=True)]


class Board:
    """Rows of float64 columns, handed out in order: processes that take the same columns mean the same by them.

    Args:
        memory: of all rows, zero at first.
        row: of this process.
    """

    def __init__(self, memory: "memoryview[int]", row: int = 0) -> None:
        numbers = memory.cast("d")
        starts = range(0, len(numbers), NUM_COLUMNS)
        self._rows = [numbers[start : start + NUM_COLUMNS] for start in starts]
        self._num_taken = 0
        self.row = row

    @classmethod
    def private(cls) -> "Board":
        """Return a board of one row that no other process sees."""
        return cls(memoryview(bytearray(_NUM_ROW_BYTES)))

    @classmethod
    def create(cls, path: Path, num_rows: int) -> "Board":
        """Make a file for `num_rows` processes and return its first row's board."""
        path.write_bytes(bytes(num_rows * _NUM_ROW_BYTES))
        return cls.attach(path, 0)

    @classmethod
    def attach(cls, path: Path, row: int) -> "Board":
        """Return the board of one row; what this row's earlier process has counted stays."""
        with path.open("r+b") as file:
            return cls(memoryview(mmap.mmap(file.fileno(), 0)), row)

    def take(self, count: int) -> Cells:
        """Return the next `count` columns."""
        start, self._num_taken = self._num_taken, self._num_taken + count
        assert self._num_taken <= NUM_COLUMNS, "the metrics need more columns"
        columns = [row[start : self._num_taken] for row in self._rows]
        return Cells(columns[self.row], columns)
