"""The parts of a packed sequence, and the tiles of rows that a GPU computes. Computes no attention."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]

SMALL_TILE, LARGE_TILE = 64, 128
"""Rows of a tile. A part of up to 64 rows, such as a window of Qwen2.5-VL, would leave half of a large one empty."""


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Consecutive parts of T rows, none of which is empty."""

    starts: Sequence[int]
    """P + 1 offsets into the rows."""
    tiles: Mapping[int, Tensor]
    """By the rows of a tile: X3 in int32, the first row of each, and the first row and the end of its part."""

    @classmethod
    def of(cls, lengths_P: Ints, upload: Callable[[npt.NDArray[Any]], Tensor] = torch.from_numpy) -> "Parts":
        """Divide rows into parts of these lengths; `upload` copies an array to the device."""
        ends_P = lengths_P.cumsum()
        tiles = {}
        for rows, is_chosen_P in ((LARGE_TILE, lengths_P > SMALL_TILE), (SMALL_TILE, lengths_P <= SMALL_TILE)):
            if is_chosen_P.any():
                tiles[rows] = upload(_tiles(lengths_P[is_chosen_P], ends_P[is_chosen_P], rows))
        return cls([0, *ends_P.tolist()], tiles)

    @property
    def num_rows(self) -> int:
        """T."""
        return self.starts[-1]


def _tiles(lengths_P: Ints, ends_P: Ints, rows: int) -> npt.NDArray[np.int32]:
    """Return the tiles of parts; the longest parts come first, so that the last programs to end are short."""
    counts_P = -(-lengths_P // rows)
    parts_X = np.repeat(np.arange(len(counts_P)), counts_P)
    numbers_X = np.arange(len(parts_X)) - np.repeat(counts_P.cumsum() - counts_P, counts_P)
    ends_X, lengths_X = ends_P[parts_X], lengths_P[parts_X]
    starts_X = ends_X - lengths_X
    columns = np.stack([starts_X + numbers_X * rows, starts_X, ends_X], axis=1)
    return columns[np.argsort(-lengths_X, kind="stable")].astype(np.int32)
