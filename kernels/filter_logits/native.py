"""`filter_logits` in C++: its arguments, mirrored from `native.h`."""

import ctypes
import math

import torch
from torch import Tensor

from octavo.kernels.native.arguments import Arguments
from octavo.kernels.native.direct import run
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.top_k.native import scratch


class Filter(ctypes.Structure):
    """See `octavo::Filter`."""

    _fields_ = (
        ("top_k", ctypes.c_int64),
        ("top_p", ctypes.c_double),
        ("log_min_p", ctypes.c_float),
        ("unused", ctypes.c_int32),
    )

    @classmethod
    def of(cls, *, top_k: int, top_p: float, min_p: float) -> "Filter":
        """Return the C++ structure of the settings."""
        return cls(top_k, top_p, math.log(min_p) if min_p > 0 else -math.inf, 0)


class FilterLogitsArguments(Arguments):
    """See `FilterLogitsArgs`."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("filter", Filter),
        ("ids", ctypes.c_void_p),
        ("num_ids", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
    )


def filter_logits(library: NativeLibrary, logits_V: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """See `octavo.kernels.filter_logits.filter_logits`."""
    count = logits_V.numel()
    ids, num_ids = torch.empty(count, dtype=torch.int64), ctypes.c_int64()
    memory = scratch(library, count)
    arguments = FilterLogitsArguments(
        logits_V.data_ptr(),
        count,
        Filter.of(top_k=top_k, top_p=top_p, min_p=min_p),
        ids.data_ptr(),
        ctypes.addressof(num_ids),
        memory.data_ptr(),
    )
    run(library, "filter_logits", arguments)
    return ids[: num_ids.value]
