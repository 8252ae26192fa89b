"""`sample` in C++: its structures, mirrored from `native.cpp`, and the call over a batch of rows."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from octavo.kernels.filter_logits.native import Filter
from octavo.kernels.logprobs.native import logprobs
from octavo.kernels.logprobs.row import RowLogprobs
from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.direct import run
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.penalties.native import Penalties
from octavo.kernels.top_k.native import scratch


class SampledRequest(ctypes.Structure):
    """The constant part of a request's sampling state. Memory that it points to must outlive it."""

    _fields_ = (
        ("temperature", ctypes.c_float),
        ("largest", ctypes.c_float),
        ("seed", ctypes.c_uint64),
        ("filter", Filter),
        ("bias_ids", ctypes.c_void_p),
        ("bias_values", ctypes.c_void_p),
        ("num_biases", ctypes.c_int64),
        ("withheld_ids", ctypes.c_void_p),
        ("num_withheld", ctypes.c_int64),
        ("min_tokens", ctypes.c_int64),
        ("has_penalties", ctypes.c_int64),
        ("penalties", Penalties),
        ("bad_ids", ctypes.c_void_p),
        ("num_bad", ctypes.c_void_p),
        ("allowed", ctypes.c_void_p),
        ("first_timestamp", ctypes.c_int64),
    )


class SampleArguments(Arguments):
    """See `SampleArgs`."""

    _fields_ = (
        ("logits", Matrix),
        ("requests", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("num_outputs", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
    )


class NativeSampler:
    """Samples rows of `vocab_size` logits on up to `max_threads` threads, and computes their logprobs."""

    def __init__(self, library: NativeLibrary, vocab_size: int, max_threads: int) -> None:
        self._library = library
        self._max_threads = max_threads
        self._scratch = scratch(library, vocab_size, max_threads)

    def sample(
        self,
        logits_RV: Tensor,
        requests: Sequence[int],
        positions: Sequence[int],
        num_outputs: Sequence[int],
        num_threads: int,
    ) -> list[int]:
        """Return one token id per row; -1 where the largest logit is NaN or infinite.

        Args:
            logits_RV: float32, left as they are; rows may lie apart.
            requests: the address of each row's `SampledRequest`.
            positions: number of tokens before the one that is drawn.
            num_outputs: number of outputs among them.
            num_threads: that share the rows.
        """
        num_rows = logits_RV.shape[0]
        integers = ctypes.c_int64 * num_rows
        token_ids = integers()
        arrays = [integers(*values) for values in (requests, positions, num_outputs)] + [token_ids]
        arguments = SampleArguments(Matrix.of(logits_RV), *map(ctypes.addressof, arrays), self._scratch.data_ptr())
        num_threads = min(num_threads, self._max_threads, num_rows)
        run(self._library, "sample", arguments, num_rows=num_rows, num_threads=num_threads)
        return list(token_ids)

    def logprobs(
        self, logits_RV: Tensor, token_ids: Sequence[int], tops: Sequence[int | Sequence[int]], num_threads: int
    ) -> list[RowLogprobs]:
        """Return the log-probabilities of one token per row and of others beside it, as `logprobs` does."""
        num_threads = min(num_threads, self._max_threads, logits_RV.shape[0])
        return logprobs(self._library, logits_RV, token_ids, tops, scratch=self._scratch, num_threads=num_threads)
