"""`gumbel_sample` in C++: its arguments, mirrored from `native.h`."""

import ctypes

import torch
from torch import Tensor

from octavo.kernels.native.arguments import Arguments
from octavo.kernels.native.direct import run
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.top_k.native import scratch


class GumbelSampleArguments(Arguments):
    """See `GumbelSampleArgs`."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("position", ctypes.c_int64),
        ("token_id", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
    )


def gumbel_sample(library: NativeLibrary, logits_C: Tensor, token_ids_C: Tensor, *, seed: int, position: int) -> int:
    """See `octavo.kernels.gumbel_sample.gumbel_sample`. At least one logit must be finite."""
    ids, token_id = token_ids_C.to(torch.int32), ctypes.c_int64()
    memory = scratch(library, logits_C.numel())
    arguments = GumbelSampleArguments(
        logits_C.data_ptr(),
        ids.data_ptr(),
        logits_C.numel(),
        seed,
        position,
        ctypes.addressof(token_id),
        memory.data_ptr(),
    )
    run(library, "gumbel_sample", arguments)
    return token_id.value
