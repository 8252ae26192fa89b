"""Aligns the tokens of a text with the rows of an audio clip by their attention: dynamic time warping."""

import numpy as np
import numpy.typing as npt

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.time_warping import cpu, native


def first_rows(
    weights_HTS: npt.NDArray[np.float32], filter_width: int, library: NativeLibrary | None, num_threads: int = 1
) -> npt.NDArray[np.float32]:
    """Return for each token the row of the sound at which it begins, ascending: shape T.

    Each number becomes the median of those around it along the last axis, which is reflected at its ends (an axis of
    half a filter or less stays as it is). The mean of the heads is aligned: the path through the matrix TS that goes
    forward in both directions and has the largest sum, in float32. Of equal sums the path takes the step to the left,
    as in `transformers`.

    Args:
        weights_HTS: attention of tokens to rows, for each head; contiguous, overwritten.
        filter_width: numbers of a median, odd.
        library: of native kernels; None: numpy computes the same bits.
        num_threads: of the library.
    """
    if library is None:
        return cpu.first_rows(weights_HTS, filter_width)
    return native.first_rows(library, weights_HTS, filter_width, num_threads)
