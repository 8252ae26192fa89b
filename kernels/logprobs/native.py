"""`logprobs` in C++, for several rows at once: its arguments, mirrored from `native.h`."""

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

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
        ("are_given", ctypes.c_void_p),
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
    tops: Sequence[int | Sequence[int]],
    *,
    scratch: Tensor,
    num_threads: int,
) -> list[RowLogprobs]:
    """Return `octavo.kernels.logprobs.logprobs` of each row; rows with NaN have no top tokens.

    Args:
        library: the native library.
        logits_RV: float32; rows may be strided.
        token_ids: one per row.
        tops: for each row, the number of most likely tokens (at most V are returned), or the requested tokens.
        scratch: `top_k.native.scratch` for V elements and `num_threads` threads.
        num_threads: threads that share the rows.
    """
    num_rows, vocab_size = logits_RV.shape
    counts = [min(top, vocab_size) if isinstance(top, int) else len(top) for top in tops]
    starts = [0, *accumulate(counts)]
    integers, floats = ctypes.c_int64 * num_rows, ctypes.c_float * num_rows
    top_ids, top_logprobs = (ctypes.c_int64 * starts[-1])(), (ctypes.c_float * starts[-1])()
    for top, start, count in zip(tops, starts, counts, strict=False):
        if not isinstance(top, int):
            top_ids[start : start + count] = list(top)
    own, ranks = floats(), integers()
    arrays: tuple[ctypes.Array[Any], ...] = (
        integers(*token_ids),
        integers(*counts),
        integers(*[not isinstance(top, int) for top in tops]),
        integers(*starts[:-1]),
        top_ids,
        top_logprobs,
        own,
        ranks,
    )
    arguments = LogprobsArguments(Matrix.of(logits_RV), *map(ctypes.addressof, arrays), scratch.data_ptr())
    run(library, "logprobs", arguments, num_rows=num_rows, num_threads=num_threads)
    rows = []
    for row, (start, count) in enumerate(zip(starts, counts, strict=False)):
        ids = top_ids[start : start + count]
        if -1 in ids:
            ids = []
        rows.append(RowLogprobs(own[row], ranks[row], ids, top_logprobs[start : start + len(ids)]))
    return rows
