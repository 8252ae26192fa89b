"""`SharedCounters`: counters of several processes in shared memory, one row per process.

Each process writes only its own row, so there are no locks. The total is the sum over all rows, including the rows of
processes that have died.
"""

import mmap
from collections.abc import Sequence
from pathlib import Path

NUM_COLUMNS = 2048
"""Number of columns of one section."""
NUM_SECTIONS = 256
"""Number of sections of a row, besides the columns without a section. Unwritten pages take no memory."""
_NUM_ROW_COLUMNS = NUM_COLUMNS * (1 + NUM_SECTIONS)
_NUM_ROW_BYTES = 8 * _NUM_ROW_COLUMNS


class CounterColumns:
    """Some columns of `SharedCounters`.

    Args:
        own: these columns in this process's row.
        rows: these columns in every row.
    """

    __slots__ = ("_rows", "own")

    def __init__(self, own: "memoryview[float]", rows: Sequence["memoryview[float]"]) -> None:
        self.own = own
        """Values of this process, which may write them. A write of one float64 is atomic."""
        self._rows = rows

    def sums(self) -> list[float]:
        """Return the total over all processes, by column."""
        return [sum(column) for column in zip(*self._rows, strict=True)]


class SharedCounters:
    """Rows of float64 columns. Processes must allocate columns in the same order to agree on their meaning.

    Args:
        memory: all rows, initially zero.
        row: index of this process.
        section: index of the section. -1: the columns without a section.
    """

    def __init__(self, memory: "memoryview[int]", row: int = 0, section: int = -1) -> None:
        assert section < NUM_SECTIONS, "NUM_SECTIONS is too small for the number of engines"
        numbers = memory.cast("d")
        starts = range((section + 1) * NUM_COLUMNS, len(numbers), _NUM_ROW_COLUMNS)
        self._memory = memory
        self._rows = [numbers[start : start + NUM_COLUMNS] for start in starts]
        self._num_allocated = 0
        self.row = row

    @classmethod
    def private(cls) -> "SharedCounters":
        """Return counters with one row, not shared with any process."""
        return cls(memoryview(bytearray(_NUM_ROW_BYTES)))

    @classmethod
    def create(cls, path: Path, num_rows: int) -> "SharedCounters":
        """Create a file for `num_rows` processes and attach to its first row."""
        with path.open("wb") as file:
            file.truncate(num_rows * _NUM_ROW_BYTES)
        return cls.attach(path, 0)

    @classmethod
    def attach(cls, path: Path, row: int) -> "SharedCounters":
        """Attach to a row. The counts of an earlier process of this row remain."""
        with path.open("r+b") as file:
            return cls(memoryview(mmap.mmap(file.fileno(), 0)), row)

    def section(self, index: int) -> "SharedCounters":
        """Return the counters of a section, with columns of their own."""
        return SharedCounters(self._memory, self.row, index)

    def allocate(self, count: int) -> CounterColumns:
        """Return the next `count` columns."""
        start, self._num_allocated = self._num_allocated, self._num_allocated + count
        assert self._num_allocated <= NUM_COLUMNS, "NUM_COLUMNS is too small for the table of metrics"
        columns = [row[start : self._num_allocated] for row in self._rows]
        return CounterColumns(columns[self.row], columns)
