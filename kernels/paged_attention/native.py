"""`plan_attention` and `paged_attention` in C++: their arguments, mirrored from `plan.h` and `native.cpp`.

A step runs `plan_attention` once and then `paged_attention` for each layer, all with one workspace. All threads must
have finished one operation before the next begins.
"""

import ctypes
from typing import TYPE_CHECKING, Self

from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.paged_attention.layout import CacheLayout, LayoutArguments

if TYPE_CHECKING:
    from octavo.kernels.paged_attention import AttentionShape


class ShapeArguments(ctypes.Structure):
    """See `Shape` in `plan.h`."""

    _fields_ = [
        ("layout", LayoutArguments),
        ("num_heads", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("slopes", ctypes.c_void_p),
        ("is_causal", ctypes.c_bool),
    ]

    @classmethod
    def of(cls, shape: "AttentionShape", layout: CacheLayout) -> Self:
        """Return the C++ structure for a model's attention and its cache.

        Raises:
            ValueError: they do not match, or the scale is not positive.
        """
        heads = shape.num_kv_heads, shape.head_dim, shape.key_value_dim
        cached = layout.num_kv_heads, layout.head_dim, layout.key_value_dim
        if heads != cached or shape.num_heads % shape.num_kv_heads:
            raise ValueError(f"{shape} with {layout}")
        if not shape.scale > 0:
            raise ValueError(f"scores cannot be scaled by {shape.scale}")
        slopes = None if shape.slopes is None else (ctypes.c_float * shape.num_heads)(*shape.slopes)
        arguments = cls(
            LayoutArguments.of(layout),
            shape.num_heads,
            -shape.window if shape.window and shape.is_chunked else shape.window or 0,
            shape.scale,
            shape.soft_cap or 0.0,
            ctypes.addressof(slopes) if slopes is not None else None,
            shape.is_causal,
        )
        arguments._slopes = slopes  # must live as long as the pointer
        return arguments


class PlanAttentionArguments(Arguments):
    """See `PlanArgs`. One thread runs it and plans for all threads."""

    _fields_ = (
        ("shape", ShapeArguments),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_int64),
        ("max_context", ctypes.c_int64),
    )


class PagedAttentionArguments(Arguments):
    """See `Args`."""

    _fields_ = (
        ("q", Matrix),
        ("out", Matrix),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("shape", ShapeArguments),
        ("workspace", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("k_scale", ctypes.c_float),
        ("v_scale", ctypes.c_float),
    )


def workspace_bytes(
    library: NativeLibrary, shape: ShapeArguments, max_rows: int, max_context: int, num_threads: int
) -> int:
    """Return the bytes of the workspace for steps with at most this many rows, keys per request and threads.

    Most of it holds the sums of split requests, and is written only if there are few long requests.
    """
    count = library.function("attention_workspace_bytes", [ctypes.c_void_p, *[ctypes.c_int64] * 3], ctypes.c_int64)
    return int(count(ctypes.addressof(shape), max_rows, max_context, num_threads))
