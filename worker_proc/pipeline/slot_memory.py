"""Memory of a device with a row for each slot, of which the host changes a few words between steps.

Knows no meaning of any column. What a step changes by itself (a sampled token, a count) never comes back to the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.worker_proc.pipeline.packed import Field, PackedLayout, words_of

Words = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]

_WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Column:
    """What every slot has."""

    name: str
    dtype: torch.dtype
    width: int | None = None
    """Numbers of a slot; None: one, and the column has one dimension."""


class SlotMemory:
    """Columns of zeros, all in one piece of memory that stays where it is, so that captured graphs may read it.

    Args:
        columns: by unique names.
        num_slots: rows.
        device: where it is.
    """

    def __init__(self, columns: Sequence[Column], num_slots: int, device: torch.device) -> None:
        self._columns = {column.name: column for column in columns}
        fields = [Field(column.name, column.dtype, num_slots * (column.width or 1)) for column in columns]
        layout = PackedLayout(fields)
        self._memory_W = torch.zeros(layout.num_bytes // _WORD_BYTES, dtype=torch.int32, device=device)
        views = layout.views(self._memory_W.view(torch.uint8))
        self._tensors = {
            column.name: views[column.name] if column.width is None else views[column.name].view(num_slots, -1)
            for column in columns
        }
        first = self._memory_W.data_ptr()
        self._first_words = {name: (view.data_ptr() - first) // _WORD_BYTES for name, view in views.items()}
        self._changes: dict[int, Words] = {}
        """By their first word."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns."""
        return self._memory_W.nbytes

    def tensor(self, name: str) -> Tensor:
        """Return a column on the device, one row for each slot."""
        return self._tensors[name]

    def write(self, name: str, slot: int, values: Sequence[float] | npt.NDArray[Any], start: int = 0) -> None:
        """Have numbers of one slot changed by the next `take_changes`.

        Of two writes before it that begin at one number the later one counts alone; otherwise none may overlap.

        Args:
            name: of the column.
            slot: whose numbers.
            values: what they become.
            start: the first of them.
        """
        column = self._columns[name]
        index = slot * (column.width or 1) + start
        first_word = self._first_words[name] + index * column.dtype.itemsize // _WORD_BYTES
        self._changes[first_word] = words_of(values, column.dtype)

    def take_changes(self) -> tuple[Places, Words]:
        """Return the places and the words of all changes since the last call, for `apply`; both empty if none."""
        changes, self._changes = self._changes, {}
        if not changes:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        lengths = np.array([len(words) for words in changes.values()])
        firsts = np.array(list(changes))
        within = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
        return np.repeat(firsts, lengths) + within, np.concatenate(list(changes.values()))

    def apply(self, places_C: Tensor, words_C: Tensor) -> None:
        """Write changes that are on the device."""
        self._memory_W.index_copy_(0, places_C, words_C)
