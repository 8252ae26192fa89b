"""Many small arrays packed into one buffer, so that one copy uploads all of them. Copies nothing itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 16
"""Alignment of each array in bytes: the widest load of a GPU."""

_DTYPES: Mapping[torch.dtype, Any] = {
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
    torch.float64: np.float64,
}


@dataclass(frozen=True, slots=True)
class Field:
    """One array."""

    name: str
    dtype: torch.dtype
    count: int


class PackedLayout:
    """The offset of each array; the same fields give the same offsets."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self._fields = tuple(fields)
        self._offsets: dict[str, int] = {}
        end = 0
        for field in fields:
            self._offsets[field.name] = end
            end += -(-field.count * field.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = end

    def host_views(self, buffer_B: Tensor) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays within a buffer in main memory."""
        return {name: view.numpy() for name, view in self.views(buffer_B).items()}

    def views(self, buffer_B: Tensor) -> dict[str, Tensor]:
        """Return the arrays within a buffer, as tensors."""
        return {field.name: self._view(field, buffer_B) for field in self._fields}

    def _view(self, field: Field, buffer_B: Tensor) -> Tensor:
        start = self._offsets[field.name]
        return buffer_B[start : start + field.count * field.dtype.itemsize].view(field.dtype)

    def offset(self, name: str) -> int:
        """Return the offset of an array in bytes."""
        return self._offsets[name]


def words_of(values: Sequence[float] | npt.NDArray[Any], dtype: torch.dtype) -> npt.NDArray[np.int32]:
    """Return numbers, converted to a dtype, as 32-bit words."""
    words: npt.NDArray[np.int32] = np.asarray(values, dtype=_DTYPES[dtype]).view(np.int32)
    return words
