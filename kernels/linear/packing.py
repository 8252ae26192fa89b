"""Packs weights for `octavo.kernels.linear.native`, once, when a model is loaded. Quantizes nothing.

Large bfloat16 weights are stored in 12 bits where that is lossless, see `coded.h` and docs/adr/0014.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels.linear.native import (
    CODEBOOK_BYTES,
    DTYPES,
    KINDS,
    PANEL_OUTPUTS,
    WORD_BYTES,
    Kind,
    NativeLinear,
    first_escapes,
    num_steps,
)
from octavo.kernels.linear.quantized import QuantizedWeight
from octavo.kernels.native.arguments import Arguments
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.memory import allocate

MIN_CODED_WEIGHTS = 2**16
"""Of a weight. A smaller one stays in a cache, where compression gains nothing."""
MAX_ESCAPES = 1 / 100
"""Largest fraction of escapes. With more, unpacking costs more time than the smaller size saves."""
UNPACKING_LEVELS = frozenset({"amx_bf16", "avx512_bf16", "avx512", "avx2"})
"""Levels whose shuffles unpack at memory speed. With plain loops a product of one row takes ten times as long."""
ESCAPE_PADDING = 64
"""Bytes after the last escape."""


class PackArguments(Arguments):
    """See `PackArgs` in `pack.cpp`."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("num_outputs", ctypes.c_int64),
        ("num_steps", ctypes.c_int64),
        ("panels", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class EncodeArguments(Arguments):
    """See `EncodeArgs` in `encode.h`."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("num_panels", ctypes.c_int64),
        ("num_steps", ctypes.c_int64),
        ("codebooks", ctypes.c_void_p),
        ("coded", ctypes.c_void_p),
        ("escapes", ctypes.c_void_p),
    )


def pack(library: NativeLibrary, weight_OI: Tensor, bias_O: Tensor | None = None) -> NativeLinear:
    """Pack a weight of bfloat16, float32 or float16; one of bfloat16 in 12 bits where that pays."""
    is_large = weight_OI.numel() >= MIN_CODED_WEIGHTS
    if weight_OI.dtype == torch.bfloat16 and is_large and library.isa in UNPACKING_LEVELS:
        packed = pack_coded(library, weight_OI, bias_O, max_escapes=MAX_ESCAPES)
        if packed is not None:
            return packed
    return pack_plain(library, weight_OI, bias_O)


def pack_plain(library: NativeLibrary, weight_OI: Tensor, bias_O: Tensor | None = None) -> NativeLinear:
    """Pack a weight of bfloat16, float32 or float16 number by number."""
    kind = next(kind for kind, dtype in DTYPES.items() if dtype == weight_OI.dtype)
    num_outputs, num_inputs = weight_OI.shape
    panels = _pack_rows(library, kind, weight_OI, num_steps(kind, num_inputs, 0))
    return NativeLinear(kind, num_inputs, num_outputs, 0, 0, panels, None, None, _pack_bias(bias_O))


def pack_coded(
    library: NativeLibrary, weight_OI: Tensor, bias_O: Tensor | None = None, *, max_escapes: float
) -> NativeLinear | None:
    """Pack a weight of bfloat16 in 12 bits, or return None.

    Args:
        library: that will multiply by it.
        weight_OI: any values; all are preserved bit for bit.
        bias_O: of any float.
        max_escapes: largest fraction of weights with an escaped upper byte; with more, None is returned.
    """
    num_outputs, num_inputs = weight_OI.shape
    steps = num_steps("bf16", num_inputs, 0)
    num_panels = -(-num_outputs // PANEL_OUTPUTS)
    panels = _pack_rows(library, "bf16", weight_OI, steps, new=_temporary)
    codebooks = allocate(num_panels * CODEBOOK_BYTES)
    call = EncodeArguments(panels.data_ptr(), num_panels, steps, codebooks.data_ptr(), None, None)
    call_on_threads(library, "choose_codes", call)
    starts = first_escapes(codebooks)
    ends = starts.cumsum(0)
    num_escapes = int(ends[-1])
    if num_escapes > max_escapes * weight_OI.numel():
        return None
    codebooks.view(torch.int64).view(num_panels, -1)[:, 2:] = (ends - starts).view(num_panels, 2)
    coded = allocate(num_panels * steps * PANEL_OUTPUTS * WORD_BYTES["bf16_12"])
    escapes = allocate(num_escapes + ESCAPE_PADDING)
    call.coded, call.escapes = coded.data_ptr(), escapes.data_ptr()
    call_on_threads(library, "encode", call)
    bias = _pack_bias(bias_O)
    return NativeLinear("bf16_12", num_inputs, num_outputs, 0, 0, coded, None, None, bias, codebooks, escapes)


def pack_quantized(library: NativeLibrary, weight: QuantizedWeight, bias_O: Tensor | None = None) -> NativeLinear:
    """Pack a quantized weight."""
    kind: Kind = "u4" if weight.bits == 4 else "u8"
    num_groups = weight.scale_OG.shape[1]
    return NativeLinear(
        kind,
        weight.num_inputs,
        weight.num_outputs,
        weight.group_size,
        weight.offset,
        _pack_rows(library, kind, weight.levels_OI, num_steps(kind, weight.num_inputs, weight.group_size)),
        _pack_rows(library, "f16", weight.scale_OG, num_groups),
        None if weight.minimum_OG is None else _pack_rows(library, "f16", weight.minimum_OG, num_groups),
        _pack_bias(bias_O),
    )


def call_on_threads(library: NativeLibrary, name: str, arguments: Arguments) -> None:
    """Call the function `octavo_<name>`, which is not part of programs, on torch's number of threads."""
    library.operation(name, type(arguments))  # checks the sizes
    function = library.function(name, [ctypes.c_void_p, ctypes.c_int64])
    function(ctypes.addressof(arguments), torch.get_num_threads())


def _temporary(num_bytes: int) -> Tensor:
    # Not `allocate`: it puts small buffers into shared memory that is freed only with the last of them.
    return torch.empty(num_bytes, dtype=torch.uint8)


def _pack_rows(
    library: NativeLibrary, kind: Kind, rows_ON: Tensor, steps: int, new: Callable[[int], Tensor] = allocate
) -> Tensor:
    """Return `steps` words of each row as panels, in memory of `new`."""
    rows_ON = rows_ON if rows_ON.stride(1) == 1 else rows_ON.contiguous()
    num_outputs, num_numbers = rows_ON.shape
    panels = new(-(-num_outputs // PANEL_OUTPUTS) * PANEL_OUTPUTS * steps * WORD_BYTES[kind])
    row_bytes = rows_ON.stride(0) * rows_ON.element_size()
    call = PackArguments(
        rows_ON.data_ptr(), row_bytes, num_numbers, num_outputs, steps, panels.data_ptr(), KINDS.index(kind), 0
    )
    call_on_threads(library, "pack", call)
    return panels


def _pack_bias(bias_O: Tensor | None) -> Tensor | None:
    if bias_O is None:
        return None
    buffer = allocate(-(-len(bias_O) // PANEL_OUTPUTS) * PANEL_OUTPUTS * 4)
    values = buffer.view(torch.float32)
    values.zero_()
    values[: len(bias_O)] = bias_O
    return buffer
