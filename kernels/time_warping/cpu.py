"""`first_rows` through numpy: numbers of an antidiagonal depend on the two before it alone."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

_DIAGONAL, _UP, _LEFT = 0, 1, 2


def first_rows(weights_HTS: Floats, filter_width: int) -> Floats:
    """See the contract in the package."""
    for values_TS in weights_HTS:  # one head after the other: a filter takes `filter_width` times its memory
        values_TS[...] = _smoothed(values_TS, filter_width)
    return _begins(-weights_HTS.mean(axis=0, dtype=np.float32))


def _smoothed(values_TS: Floats, width: int) -> Floats:
    margin = width // 2
    if margin == 0 or values_TS.shape[-1] <= margin:
        return values_TS
    padded = np.pad(values_TS, ((0, 0), (margin, margin)), mode="reflect")
    around = np.lib.stride_tricks.sliding_window_view(padded, width, axis=-1)
    smoothed: Floats = np.partition(around, margin, axis=-1)[..., margin]
    return smoothed


def _begins(costs_TS: Floats) -> Floats:
    """Return the first column of each row on the cheapest path from the first corner to the last one."""
    num_rows, num_columns = costs_TS.shape
    steps_TS = np.empty((num_rows, num_columns), dtype=np.int8)
    infinity = np.float32(np.inf)
    # By row, with one in front of the first: the last antidiagonal and the one before it.
    last, before = np.full(num_rows + 1, infinity), np.full(num_rows + 1, infinity)
    before[0] = 0.0
    for diagonal in range(num_rows + num_columns - 1):
        rows = np.arange(max(0, diagonal - num_columns + 1), min(num_rows, diagonal + 1))
        columns = diagonal - rows
        # Of the number at row r: at row r - 1 in the column before, at row r - 1, and in the column before.
        diagonals, ups, lefts = before[rows], last[rows], last[rows + 1]
        goes_diagonally = (diagonals < ups) & (diagonals < lefts)
        goes_up = ~goes_diagonally & (ups < diagonals) & (ups < lefts)
        least = np.where(goes_diagonally, diagonals, np.where(goes_up, ups, lefts))
        steps_TS[rows, columns] = np.where(goes_diagonally, _DIAGONAL, np.where(goes_up, _UP, _LEFT))
        following = np.full(num_rows + 1, infinity)
        following[rows + 1] = costs_TS[rows, columns] + least
        before, last = last, following
    begins_T = np.zeros(num_rows, dtype=np.float32)
    row, column = num_rows - 1, num_columns - 1
    while row >= 0:
        begins_T[row] = column
        step = steps_TS[row, column] if column else _UP
        row -= int(step != _LEFT)
        column -= int(step != _UP)
    return begins_T
