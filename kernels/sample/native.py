"""`sample` in C++: its structures, mirrored from `native.cpp`, and the call over a batch of rows."""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from octavo.kernels.filter_logits.native import Filter
from octavo.kernels.logprobs.native import logprobs
from octavo.kernels.logprobs.row import RowLogprobs
from octavo.kernels.native.arguments import Arguments, Matrix, StepArguments
from octavo.kernels.native.direct import DirectCall
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.penalties.native import Penalties
from octavo.kernels.top_k.native import scratch

Ints = npt.NDArray[np.int64]


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


class PreparedSamples:
    """The arguments of `sample` for some rows, except for their logits: see `NativeSampler.prepare`."""

    def __init__(
        self,
        library: NativeLibrary,
        scratch: Tensor,
        max_threads: int,
        requests: Sequence[int],
        positions_R: Ints,
        num_outputs_R: Ints,
    ) -> None:
        num_rows = len(requests)
        self._call = DirectCall(
            library, "sample", SampleArguments(scratch=scratch.data_ptr()), StepArguments(num_rows=num_rows)
        )
        self._max_threads = min(max_threads, num_rows)
        self._requests = (ctypes.c_int64 * num_rows)(*requests)
        self._token_ids = (ctypes.c_int64 * num_rows)()
        self._logits_RV: Tensor | None = None
        """Logits that the arguments refer to."""
        self._arrays = scratch, positions_R, num_outputs_R  # a structure does not keep alive what it points to
        arguments = self._call.arguments
        arguments.requests, arguments.token_ids = map(ctypes.addressof, (self._requests, self._token_ids))
        arguments.positions, arguments.num_outputs = positions_R.ctypes.data, num_outputs_R.ctypes.data

    def sample(self, logits_RV: Tensor, num_threads: int) -> list[int]:
        """Return one token id per row; -1 if the largest logit is NaN or infinite.

        Args:
            logits_RV: float32, not modified; rows may be strided.
            num_threads: threads that share the rows.
        """
        if logits_RV is not self._logits_RV:  # perf: otherwise their memory is the same
            self._logits_RV, self._call.arguments.logits = logits_RV, Matrix.of(logits_RV)
        self._call.run(min(num_threads, self._max_threads))
        return list(self._token_ids)


class NativeSampler:
    """Samples rows of `vocab_size` logits on up to `max_threads` threads, and computes their logprobs."""

    def __init__(self, library: NativeLibrary, vocab_size: int, max_threads: int) -> None:
        self._library = library
        self._max_threads = max_threads
        self._scratch = scratch(library, vocab_size, max_threads)

    def prepare(self, requests: Sequence[int], positions_R: Ints, num_outputs_R: Ints) -> "PreparedSamples":
        """Prepare draws, which may be repeated after the arrays have changed.

        Args:
            requests: the address of each row's `SampledRequest`.
            positions_R: number of tokens before the drawn one; contiguous.
            num_outputs_R: number of output tokens among them; contiguous.
        """
        return PreparedSamples(self._library, self._scratch, self._max_threads, requests, positions_R, num_outputs_R)

    def logprobs(
        self, logits_RV: Tensor, token_ids: Sequence[int], tops: Sequence[int | Sequence[int]], num_threads: int
    ) -> list[RowLogprobs]:
        """Return the log-probabilities of one token per row, and of its top tokens, as `logprobs` does."""
        num_threads = min(num_threads, self._max_threads, logits_RV.shape[0])
        return logprobs(self._library, logits_RV, token_ids, tops, scratch=self._scratch, num_threads=num_threads)
