"""`apply_penalties` in C++: settings, counts and arguments, mirrored from `native.h`."""

import ctypes

from torch import Tensor

from octavo.kernels.native.arguments import Arguments
from octavo.kernels.native.direct import run
from octavo.kernels.native.library import NativeLibrary


class Penalties(ctypes.Structure):
    """See `octavo::Penalties`. Ids and counts are int32; `num_seen` is the address of an int64."""

    _fields_ = (
        ("seen_ids", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("num_seen", ctypes.c_void_p),
        ("repetition", ctypes.c_float),
        ("frequency", ctypes.c_float),
        ("presence", ctypes.c_float),
        ("unused", ctypes.c_int32),
    )


class ApplyPenaltiesArguments(Arguments):
    """See `ApplyPenaltiesArgs`."""

    _fields_ = (("logits", ctypes.c_void_p), ("penalties", Penalties))


def apply_penalties(
    library: NativeLibrary,
    logits_V: Tensor,
    seen_ids_S: Tensor,
    output_counts_S: Tensor,
    *,
    repetition: float,
    frequency: float,
    presence: float,
) -> None:
    """See `octavo.kernels.penalties.apply_penalties`; ids are int32."""
    num_seen = ctypes.c_int64(len(seen_ids_S))
    penalties = Penalties(
        seen_ids_S.data_ptr(),
        output_counts_S.data_ptr(),
        ctypes.addressof(num_seen),
        repetition,
        frequency,
        presence,
        0,
    )
    run(library, "apply_penalties", ApplyPenaltiesArguments(logits_V.data_ptr(), penalties))
