"""`store_kv` in C++: its arguments, mirrored from `native.h`."""

import ctypes

from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.paged_attention.layout import LayoutArguments


class StoreKvArguments(Arguments):
    """See `Args`. Keys and values are float32, or bfloat16 where the cache is, whose type is in the layout."""

    _fields_ = (
        ("k", Matrix),
        ("v", Matrix),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("layout", LayoutArguments),
        ("k_scale", ctypes.c_float),
        ("v_scale", ctypes.c_float),
    )
