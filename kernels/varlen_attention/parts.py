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
    key_ends: Sequence[int]
    """P ends of the rows of each part that its rows attend to. Rows from there on are not attended to."""
    tiles: Mapping[int, Tensor]
    """Tiles by their number of rows: X4 in int32: first row; its part's first row, end and `key_ends`."""

    @classmethod
    def of(
        cls,
        lengths_P: Ints,
        upload: Callable[[npt.NDArray[Any]], Tensor] = torch.from_numpy,
        *,
        num_keys_P: Ints | None = None,
    ) -> "Parts":
        """Divide rows into parts.

        Args:
            lengths_P: number of rows of each part.
            upload: copies an array to the device.
            num_keys_P: number of rows of each part, from its first one, that are attended to; `None`: all.
        """
        ends_P = lengths_P.cumsum()
        key_ends_P = ends_P if num_keys_P is None else ends_P - lengths_P + num_keys_P
        tiles = {}
        for rows, is_chosen_P in ((LARGE_TILE, lengths_P > SMALL_TILE), (SMALL_TILE, lengths_P <= SMALL_TILE)):
            if is_chosen_P.any():
                chosen = _tiles(lengths_P[is_chosen_P], ends_P[is_chosen_P], key_ends_P[is_chosen_P], rows)
                tiles[rows] = upload(chosen)
        return cls([0, *ends_P.tolist()], key_ends_P.tolist(), tiles)

    @property
    def num_rows(self) -> int:
        """T."""
        return self.starts[-1]


def _tiles(lengths_P: Ints, ends_P: Ints, key_ends_P: Ints, rows: int) -> npt.NDArray[np.int32]:
    """Return the tiles of parts; the longest parts come first, so that the last programs to end are short."""
    counts_P = -(-lengths_P // rows)
    parts_X = np.repeat(np.arange(len(counts_P)), counts_P)
    numbers_X = np.arange(len(parts_X)) - np.repeat(counts_P.cumsum() - counts_P, counts_P)
    ends_X, lengths_X = ends_P[parts_X], lengths_P[parts_X]
    starts_X = ends_X - lengths_X
    columns = np.stack([starts_X + numbers_X * rows, starts_X, ends_X, key_ends_P[parts_X]], axis=1)
    return columns[np.argsort(-lengths_X, kind="stable")].astype(np.int32)
