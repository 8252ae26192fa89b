"""When the tokens of a text are spoken, by what they attend to: Whisper's dynamic time warping."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

_DIAGONAL, _UP, _LEFT = 0, 1, 2


def first_rows(weights_HTS: Floats, filter_width: int) -> Floats:
    """Return for each token the row of the sound at which it begins to attend, ascending: shape T.

    The weights of each head are normalized over the tokens and smoothed over the rows, and the mean of the heads is
    aligned: the path through the matrix that goes forward in both directions and has the largest sum.

    Args:
        weights_HTS: attention of tokens to rows, for each head.
        filter_width: rows of the median filter, odd.
    """
    deviations_HTS = weights_HTS - weights_HTS.mean(axis=1, keepdims=True)
    scale_H1S = weights_HTS.std(axis=1, keepdims=True)
    # A row that all tokens attend to alike says nothing.
    normal_HTS = np.divide(deviations_HTS, scale_H1S, out=np.zeros_like(deviations_HTS), where=scale_H1S > 0)
    for values_TS in normal_HTS:  # one head after the other: a filter takes `filter_width` times its memory
        values_TS[...] = _smoothed(values_TS, filter_width)
    return _begins(-normal_HTS.mean(axis=0, dtype=np.float32).astype(np.float64))


def _smoothed(values_TS: Floats, width: int) -> Floats:
    """Return the medians around each number, along the last axis, which is reflected at its ends."""
    margin = width // 2
    if margin == 0 or values_TS.shape[-1] <= margin:
        return values_TS
    padded = np.pad(values_TS, ((0, 0), (margin, margin)), mode="reflect")
    around = np.lib.stride_tricks.sliding_window_view(padded, width, axis=-1)
    smoothed: Floats = np.partition(around, margin, axis=-1)[..., margin]
    return smoothed


def _begins(costs_TS: npt.NDArray[np.float64]) -> Floats:
    """Return the first column of each row on the cheapest path from the first corner to the last one.

    Numbers of an antidiagonal depend on the two before it alone, so each is computed at once. Sums are float32, and
    of equal ones the path takes the step to the left, as in `transformers`.
    """
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
        following[rows + 1] = (costs_TS[rows, columns] + least).astype(np.float32)
        before, last = last, following
    begins_T = np.zeros(num_rows, dtype=np.float32)
    row, column = num_rows - 1, num_columns - 1
    while row >= 0:
        begins_T[row] = column
        step = steps_TS[row, column] if column else _UP
        row -= int(step != _LEFT)
        column -= int(step != _UP)
    return begins_T
