"""Finds when the tokens of a text are spoken, from their cross-attention: Whisper's dynamic time warping."""

import numpy as np
import numpy.typing as npt

from octavo.kernels import time_warping
from octavo.kernels.native.library import NativeLibrary

Floats = npt.NDArray[np.float32]


def first_rows(
    weights_HTS: Floats, filter_width: int, library: NativeLibrary | None = None, num_threads: int = 1
) -> Floats:
    """Return for each token the row of the audio clip at which it begins to attend, ascending: shape T.

    The weights of each head are normalized over the tokens, smoothed over the rows, and aligned.

    Args:
        weights_HTS: attention of tokens to rows, for each head.
        filter_width: rows of the median filter, odd.
        library: native kernels; `None`: numpy computes, with the same bits.
        num_threads: number of threads of the library.
    """
    deviations_HTS = weights_HTS - weights_HTS.mean(axis=1, keepdims=True)
    scale_H1S = weights_HTS.std(axis=1, keepdims=True)
    # A row that all tokens attend to alike carries no information.
    normal_HTS = np.zeros(weights_HTS.shape, dtype=np.float32)
    np.divide(deviations_HTS, scale_H1S, out=normal_HTS, where=scale_H1S > 0)
    return time_warping.first_rows(normal_HTS, filter_width, library, num_threads)
