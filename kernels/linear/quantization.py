"""Quantizes weights at load: from floats to levels, in C++ (see `quantize_weight.h`), or to float codes, in torch."""

import ctypes
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from octavo.kernels.dispatch import require
from octavo.kernels.linear.codebooks import codebook
from octavo.kernels.linear.packing import call_on_threads
from octavo.kernels.linear.quantized import QuantizedWeight
from octavo.kernels.linear.stacked import StackedRows, some_rows
from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.library import NativeLibrary

Quantization = Literal["int8", "int4", "w8a8", "fp8", "nf4"]
"""int8, int4: levels with a scale (int4: and a minimum) for each group of 32 inputs. w8a8: 8-bit levels with one scale
per output, for rows with one scale each. fp8: 8-bit floats (e4m3) with one scale per output. nf4: bitsandbytes'
NormalFloat with a scale for each group of 64 inputs."""
GROUP_SIZE = 32
NF4_GROUP_SIZE = 64
_AT_ONCE = 2**18
"""Elements of a weight that are quantized at once. Torch holds several float32 copies of some of them."""


class QuantizeWeightArguments(Arguments):
    """See `QuantizeWeightArgs`."""

    _fields_ = (
        ("weight", Matrix),
        ("num_outputs", ctypes.c_int64),
        ("group_size", ctypes.c_int64),
        ("levels", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("minimums", ctypes.c_void_p),
    )


def quantize_weight(
    library: NativeLibrary | None, weight_OI: Tensor | StackedRows, kind: Quantization, group_size: int = GROUP_SIZE
) -> QuantizedWeight:
    """Return the weight, of float32, bfloat16 or float16, in 8 or 4 bits.

    Args:
        library: not needed for float codes.
        weight_OI: any strides.
        kind: see `Quantization`.
        group_size: for int8 and int4.

    Raises:
        ShapeError: it is not a matrix of floats.
    """
    require(
        len(weight_OI.shape) == 2 and weight_OI.dtype.is_floating_point,
        "quantize: a weight that is not a matrix of floats",
    )
    num_outputs, num_inputs = weight_OI.shape
    size = max(_AT_ONCE // num_inputs, 1)
    whole: QuantizedWeight | None = None
    for start in range(0, num_outputs, size):
        piece = _quantize_rows(library, some_rows(weight_OI, start, start + size), kind, group_size)
        if piece.num_outputs == num_outputs:
            return piece
        whole = whole or _with_outputs(piece, num_outputs)
        for name in _ROWS:
            if (values := getattr(piece, name)) is not None:
                getattr(whole, name)[start : start + size] = values
    assert whole is not None, "a matrix has rows"
    return whole


_ROWS = ("levels_OI", "scale_OG", "minimum_OG")


def _with_outputs(piece: QuantizedWeight, num_outputs: int) -> QuantizedWeight:
    """Return an empty weight in the form of `piece` with `num_outputs` outputs. Joining all pieces would take twice the
    memory."""
    tensors = {name: values for name in _ROWS if (values := getattr(piece, name)) is not None}
    return replace(piece, **{name: values.new_empty(num_outputs, values.shape[1]) for name, values in tensors.items()})


def _quantize_rows(
    library: NativeLibrary | None, rows_OI: Tensor, kind: Quantization, group_size: int
) -> QuantizedWeight:
    if kind == "w8a8":
        return _quantize_channels(rows_OI)
    if kind == "fp8":
        return _quantize_fp8(rows_OI)
    if kind == "nf4":
        return _quantize_nf4(rows_OI)
    assert library is not None, "int8 and int4 are quantized by the native library"
    rows_OI = rows_OI if rows_OI.stride(1) == 1 else rows_OI.contiguous()
    groups = (rows_OI.shape[0], -(-rows_OI.shape[1] // group_size))
    is_affine = kind == "int4"
    quantized = QuantizedWeight(
        levels_OI=torch.empty(rows_OI.shape, dtype=torch.uint8),
        scale_OG=torch.empty(groups, dtype=torch.float16),
        minimum_OG=torch.empty(groups, dtype=torch.float16) if is_affine else None,
        offset=0 if is_affine else 128,
        bits=4 if is_affine else 8,
        group_size=group_size,
    )
    call = QuantizeWeightArguments(
        Matrix.of(rows_OI),
        rows_OI.shape[0],
        group_size,
        quantized.levels_OI.data_ptr(),
        quantized.scale_OG.data_ptr(),
        None if quantized.minimum_OG is None else quantized.minimum_OG.data_ptr(),
    )
    call_on_threads(library, "quantize_weight", call)
    return quantized


def _quantize_channels(weight_OI: Tensor) -> QuantizedWeight:
    """Return 8-bit levels with `scale = largest magnitude / 127`, rounded to nearest, ties to even."""
    values_OI = weight_OI.to(torch.float32, copy=True)
    scale_O1 = torch.maximum(values_OI.amax(1, keepdim=True), -values_OI.amin(1, keepdim=True)) / 127.0
    levels_OI = values_OI.div_(scale_O1.clamp(min=1e-30)).round_().clamp_(-127.0, 127.0).add_(128.0).to(torch.uint8)
    return QuantizedWeight(levels_OI, scale_O1, None, 128, 8, weight_OI.shape[1], row_type="int8_token")


def _quantize_fp8(weight_OI: Tensor) -> QuantizedWeight:
    """Return 8-bit floats; the largest magnitude of an output becomes 448, the largest value of e4m3."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale_O1 = (weight_OI.abs().amax(1, keepdim=True).float() / largest).clamp_min(torch.finfo(torch.float32).tiny)
    codes_OI = (weight_OI.float() / scale_O1).clamp(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8)
    return QuantizedWeight(codes_OI, scale_O1, None, 0, 8, weight_OI.shape[1], codebook="e4m3", row_type="fp8_token")


def _quantize_nf4(weight_OI: Tensor) -> QuantizedWeight:
    """Return the nearest codes; the largest magnitude of a group becomes 1 or -1."""
    num_outputs, num_inputs = weight_OI.shape
    padding = -num_inputs % NF4_GROUP_SIZE
    groups_OGI = torch.nn.functional.pad(weight_OI.float(), (0, padding)).view(num_outputs, -1, NF4_GROUP_SIZE)
    scale_OG = groups_OGI.abs().amax(2)
    numbers = codebook("nf4").to(weight_OI.device)
    scaled_OGI = groups_OGI / scale_OG.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(2)
    codes_OGI = torch.bucketize(scaled_OGI, (numbers[1:] + numbers[:-1]) / 2)
    codes_OI = codes_OGI.flatten(1)[:, :num_inputs].to(torch.uint8)
    return QuantizedWeight(codes_OI.contiguous(), scale_OG, None, 0, 4, NF4_GROUP_SIZE, codebook="nf4")
