"""`top_k` in C++: its arguments, mirrored from `native.h`, and the memory that all selections need."""

import ctypes

import torch
from torch import Tensor

from octavo.kernels.native.arguments import Arguments
from octavo.kernels.native.direct import run
from octavo.kernels.native.library import NativeLibrary


class TopKArguments(Arguments):
    """See `TopKArgs`."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("indices", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
    )


def scratch(library: NativeLibrary, width: int, num_threads: int = 1) -> Tensor:
    """Return memory for selections from rows of `width` numbers; the system gives only what is written."""
    num_bytes = library.function("row_scratch_bytes", [ctypes.c_int64], ctypes.c_int64)
    return torch.empty(num_threads * num_bytes(width), dtype=torch.uint8)


def top_k(library: NativeLibrary, values_V: Tensor, k: int) -> Tensor:
    """See `octavo.kernels.top_k.top_k`."""
    count = values_V.numel()
    indices = torch.empty(min(k, count), dtype=torch.int64)
    memory = scratch(library, count)
    arguments = TopKArguments(values_V.data_ptr(), count, len(indices), indices.data_ptr(), memory.data_ptr())
    run(library, "top_k", arguments)
    return indices
