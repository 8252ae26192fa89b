"""Device memory with a row for each slot. The host sends the words that change between steps.

Does not know what a column means. Values that a step changes (a sampled token, a count) are never copied back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.worker_proc.runners.cuda_graphs.packed import Field, PackedLayout, words_of

Words = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]

_WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Column:
    """A number, or a list of numbers, per slot."""

    name: str
    dtype: torch.dtype
    width: int | None = None
    """Numbers per slot; `None` means one number, and a one-dimensional column."""


class SlotMemory:
    """Columns, initially zero, in one allocation that never moves, so that captured graphs may read it.

    Args:
        columns: with unique names.
        num_slots: rows.
        device: device of the memory.
    """

    def __init__(self, columns: Sequence[Column], num_slots: int, device: torch.device) -> None:
        self._columns = {column.name: column for column in columns}
        fields = [
            Field(column.name, column.dtype, num_slots * (1 if column.width is None else column.width))
            for column in columns
        ]
        layout = PackedLayout(fields)
        self._memory_W = torch.zeros(layout.num_bytes // _WORD_BYTES, dtype=torch.int32, device=device)
        views = layout.views(self._memory_W.view(torch.uint8))
        self._tensors = {
            column.name: views[column.name]
            if column.width is None
            else views[column.name].view(num_slots, column.width)
            for column in columns
        }
        self._first_words = {column.name: layout.offset(column.name) // _WORD_BYTES for column in columns}
        self._changes: dict[int, Words] = {}
        """Changes by their first word."""
        self._rows: dict[str, dict[int, Words]] = {}
        """Rows by column and slot."""

    @property
    def device(self) -> torch.device:
        """Device of the memory."""
        return self._memory_W.device

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns."""
        return self._memory_W.nbytes

    def tensor(self, name: str) -> Tensor:
        """Return a column on the device, one row for each slot."""
        return self._tensors[name]

    def write(self, name: str, slot: int, values: Sequence[float] | npt.NDArray[Any], start: int = 0) -> None:
        """Change numbers of one slot with the next `take_changes`.

        A later write with the same start replaces an earlier one; other writes must not overlap.

        Args:
            name: name of the column.
            slot: row of the column.
            values: the new numbers.
            start: index of the first one.
        """
        column = self._columns[name]
        index = slot * (column.width or 1) + start
        first_word = self._first_words[name] + index * column.dtype.itemsize // _WORD_BYTES
        self._changes[first_word] = words_of(values, column.dtype)

    def write_row(self, name: str, slot: int, values: npt.NDArray[np.int32]) -> None:
        """Replace a row of a wide int32 column. It is sent without an index per word.

        A later write to the same row before the next `take_rows` replaces an earlier one.
        """
        self._rows.setdefault(name, {})[slot] = values

    def take_rows(self) -> dict[str, dict[int, Words]]:
        """Return the changed rows since the last call, by column and slot."""
        rows, self._rows = self._rows, {}
        return rows

    def take_changes(self) -> tuple[Places, Words]:
        """Return indices and words of all changes since the last call, for `apply`; both empty if there are none."""
        changes, self._changes = self._changes, {}
        if not changes:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        lengths = np.array([len(words) for words in changes.values()])
        firsts = np.array(list(changes))
        within = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
        return np.repeat(firsts, lengths) + within, np.concatenate(list(changes.values()))

    def apply(self, places_C: Tensor, words_C: Tensor) -> None:
        """Write changes that were uploaded."""
        self._memory_W.index_copy_(0, places_C, words_C)
