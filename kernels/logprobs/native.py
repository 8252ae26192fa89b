"""`logprobs` in C++, for several rows at once: its arguments, mirrored from `native.h`."""

import ctypes
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from octavo.kernels.logprobs.row import RowLogprobs
from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.direct import run
from octavo.kernels.native.library import NativeLibrary


class LogprobsArguments(Arguments):
    """See `LogprobsArgs`."""

    _fields_ = (
        ("logits", Matrix),
        ("token_ids", ctypes.c_void_p),
        ("num_tops", ctypes.c_void_p),
        ("top_starts", ctypes.c_void_p),
        ("top_ids", ctypes.c_void_p),
        ("top_logprobs", ctypes.c_void_p),
        ("token_logprobs", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
    )


def logprobs(
    library: NativeLibrary,
    logits_RV: Tensor,
    token_ids: Sequence[int],
    num_tops: Sequence[int],
    *,
    scratch: Tensor,
    num_threads: int,
) -> list[RowLogprobs]:
    """Return `octavo.kernels.logprobs.logprobs` of each row; no top tokens where logits are no numbers.

    Args:
        library: compiled.
        logits_RV: float32; rows may lie apart.
        token_ids: one per row.
        num_tops: one per row; more than there are tokens means all.
        scratch: `top_k.native.scratch` for V numbers and `num_threads` threads.
        num_threads: to share the rows.
    """
    num_rows, vocab_size = logits_RV.shape
    tokens = np.asarray(token_ids, dtype=np.int64)
    counts = np.minimum(np.asarray(num_tops, dtype=np.int64), vocab_size)
    ends = counts.cumsum()
    starts = ends - counts
    top_ids, top_logprobs = np.empty(ends[-1], dtype=np.int64), np.empty(ends[-1], dtype=np.float32)
    own, ranks = np.empty(num_rows, dtype=np.float32), np.empty(num_rows, dtype=np.int64)
    arrays = (tokens, counts, starts, top_ids, top_logprobs, own, ranks)
    arguments = LogprobsArguments(Matrix.of(logits_RV), *(array.ctypes.data for array in arrays), scratch.data_ptr())
    run(library, "logprobs", arguments, num_rows=num_rows, num_threads=num_threads)
    rows = []
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        ids = top_ids[start:end].tolist()
        if -1 in ids:
            ids = []
        rows.append(RowLogprobs(float(own[row]), int(ranks[row]), ids, top_logprobs[start : start + len(ids)].tolist()))
    return rows
