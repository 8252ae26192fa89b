"""Aligns the tokens of a text with the rows of an audio clip by their attention: dynamic time warping."""

import numpy as np
import numpy.typing as npt

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.time_warping import cpu, native


def first_rows(
    weights_HTS: npt.NDArray[np.float32], filter_width: int, library: NativeLibrary | None, num_threads: int = 1
) -> npt.NDArray[np.float32]:
    """Return for each token the row of the audio clip at which it begins, ascending: shape T.

    Each number is replaced by the median of its neighbours along the last axis, which is reflected at its ends (an axis
    of half a filter or less is unchanged). The mean of the heads is aligned: the path through the matrix TS that goes
    forward in both directions and has the largest sum, in float32. If sums are equal, the path takes the step to the
    left, as in `transformers`.

    Args:
        weights_HTS: attention of tokens to rows, for each head; contiguous, overwritten.
        filter_width: number of values in a median, odd.
        library: the native library; numpy computes the same bits if `None`.
        num_threads: threads that the library uses.
    """
    if library is None:
        return cpu.first_rows(weights_HTS, filter_width)
    return native.first_rows(library, weights_HTS, filter_width, num_threads)
