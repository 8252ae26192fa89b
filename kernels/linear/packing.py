"""Packs weights for `octavo.kernels.linear.native`, once, when a model is loaded. Quantizes nothing."""

import ctypes

import torch
from torch import Tensor

from octavo.kernels.linear.native import (
    DTYPES,
    KINDS,
    PANEL_OUTPUTS,
    WORD_BYTES,
    Kind,
    NativeLinear,
    num_steps,
)
from octavo.kernels.linear.quantized import QuantizedWeight
from octavo.kernels.native.arguments import Arguments
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.memory import allocate


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


def pack(library: NativeLibrary, weight_OI: Tensor, bias_O: Tensor | None = None) -> NativeLinear:
    """Pack a weight of bfloat16, float32 or float16."""
    kind = next(kind for kind, dtype in DTYPES.items() if dtype == weight_OI.dtype)
    num_outputs, num_inputs = weight_OI.shape
    panels = _pack_rows(library, kind, weight_OI, num_steps(kind, num_inputs, 0))
    return NativeLinear(kind, num_inputs, num_outputs, 0, 0, panels, None, None, _pack_bias(bias_O))


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
    """Call the function `octavo_<name>`, which is no operation of a program, on torch's number of threads."""
    library.operation(name, type(arguments))  # the sizes agree
    function = library.function(name, [ctypes.c_void_p, ctypes.c_int64])
    function(ctypes.addressof(arguments), torch.get_num_threads())


def _pack_rows(library: NativeLibrary, kind: Kind, rows_ON: Tensor, steps: int) -> Tensor:
    """Return `steps` words of each row as panels."""
    rows_ON = rows_ON if rows_ON.stride(1) == 1 else rows_ON.contiguous()
    num_outputs, num_numbers = rows_ON.shape
    panels = allocate(-(-num_outputs // PANEL_OUTPUTS) * PANEL_OUTPUTS * steps * WORD_BYTES[kind])
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
