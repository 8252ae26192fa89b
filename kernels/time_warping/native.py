"""`time_warping` in C++: its arguments, mirrored from `native.h`."""

import ctypes

import numpy as np
import numpy.typing as npt

from octavo.kernels.native.arguments import Arguments
from octavo.kernels.native.direct import run
from octavo.kernels.native.library import NativeLibrary

MAX_WIDTH = 63
"""Maximum width of the filter: see `kMaxWidth`."""
_LANES = 16


class TimeWarpingArguments(Arguments):
    """See `TimeWarpingArgs`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_heads", "num_tokens", "num_rows", "width", "padded_size")),
        *((name, ctypes.c_void_p) for name in ("weights", "padded", "costs", "sums", "steps", "begins")),
    )


def first_rows(
    library: NativeLibrary, weights_HTS: npt.NDArray[np.float32], filter_width: int, num_threads: int
) -> npt.NDArray[np.float32]:
    """See the contract in the package."""
    assert weights_HTS.flags.c_contiguous and weights_HTS.dtype == np.float32 and 0 < filter_width <= MAX_WIDTH
    num_heads, num_tokens, num_rows = weights_HTS.shape
    padded_size = num_rows + filter_width + _LANES
    padded = np.empty((num_threads, padded_size), dtype=np.float32)
    costs_TS = np.empty((num_tokens, num_rows), dtype=np.float32)
    sums, steps_TS = np.empty(num_rows, dtype=np.float32), np.empty((num_tokens, num_rows), dtype=np.int8)
    begins_T = np.empty(num_tokens, dtype=np.float32)
    buffers = (weights_HTS, padded, costs_TS, sums, steps_TS, begins_T)
    arguments = TimeWarpingArguments(
        num_heads, num_tokens, num_rows, filter_width, padded_size, *(buffer.ctypes.data for buffer in buffers)
    )
    run(library, "time_warping", arguments, num_threads=num_threads)
    return begins_T
