"""Packs weights for `octavo.kernels.linear.native` when a model is loaded. Quantizes nothing.

Large bfloat16 weights are stored in 12 bits if that is lossless; see `coded.h` and docs/adr/0014.
"""

import ctypes
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from octavo.kernels.dispatch import require
from octavo.kernels.linear.codebooks import Codebook, codebook
from octavo.kernels.linear.native import (
    CODEBOOK_BYTES,
    DTYPES,
    KINDS,
    MAX_INT12_GROUP,
    NUM_LEVELS,
    PANEL_OUTPUTS,
    WORD_BYTES,
    Kind,
    NativeLinear,
    channel_group,
    first_escapes,
    num_steps,
)
from octavo.kernels.linear.quantized import GROUP_SIZES, QuantizedWeight, fits_float16
from octavo.kernels.linear.stacked import StackedRows, some_rows
from octavo.kernels.native.arguments import Arguments
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.memory import allocate

MIN_CODED_WEIGHTS = 2**16
"""Minimum elements of a weight that is stored in 12 bits. A smaller one stays in a cache, so compression gains
nothing."""
MAX_ESCAPES = 1 / 100
"""Largest fraction of escapes. With more, unpacking costs more time than the smaller size saves."""
UNPACKING_LEVELS = frozenset({"amx_bf16", "avx512_bf16", "avx512_vnni", "avx512", "avx2"})
"""Levels whose shuffles unpack at memory speed. With plain loops a product of one row would take ten times as long."""
MAX_CHANNEL_INPUTS = 2**16
"""Maximum inputs of a weight with one scale per output: 255 * 128 * 2^16 is below 2^31."""
PACKED_AT_ONCE_BYTES = 4 * 2**20
"""Bytes of a float weight's rows that are packed at once, so that packing needs little memory besides the packed
form."""
ESCAPE_PADDING = 64
"""Padding bytes after the last escape."""
_HALVES = torch.tensor([12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0], dtype=torch.uint8)
"""Twice the value of each e2m1 code, plus 12."""
_USED_HALVES = tuple(sorted(set(_HALVES.tolist())))


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


def pack(library: NativeLibrary, weight_OI: Tensor | StackedRows, bias_O: Tensor | None = None) -> NativeLinear:
    """Pack a weight of bfloat16, float32 or float16; bfloat16 is stored in 12 bits if that pays off."""
    is_large = math.prod(weight_OI.shape) >= MIN_CODED_WEIGHTS
    if weight_OI.dtype == torch.bfloat16 and is_large and library.isa in UNPACKING_LEVELS:
        packed = pack_coded(library, weight_OI, bias_O, max_escapes=MAX_ESCAPES)
        if packed is not None:
            return packed
    return pack_plain(library, weight_OI, bias_O)


def pack_plain(library: NativeLibrary, weight_OI: Tensor | StackedRows, bias_O: Tensor | None = None) -> NativeLinear:
    """Pack a weight of bfloat16, float32 or float16 element by element."""
    kind = next(kind for kind, dtype in DTYPES.items() if dtype == weight_OI.dtype)
    num_outputs, num_inputs = weight_OI.shape
    steps = num_steps(kind, num_inputs, 0)
    panels = allocate(-(-num_outputs // PANEL_OUTPUTS) * _panel_bytes(kind, steps))
    for first, rows_PI in _some_panels(weight_OI, _panel_bytes(kind, steps)):
        _pack_into(library, kind, rows_PI, steps, panels[first * _panel_bytes(kind, steps) :])
    return NativeLinear(kind, num_inputs, num_outputs, 0, 0, panels, None, None, _pack_bias(bias_O))


def pack_coded(
    library: NativeLibrary, weight_OI: Tensor | StackedRows, bias_O: Tensor | None = None, *, max_escapes: float
) -> NativeLinear | None:
    """Pack a weight of bfloat16 in 12 bits, or return None.

    Args:
        library: library that will multiply by the weight.
        weight_OI: any values; all are preserved bit for bit.
        bias_O: any float dtype.
        max_escapes: largest fraction of weights with an escaped upper byte; with more, the result is None.
    """
    num_outputs, num_inputs = weight_OI.shape
    steps = num_steps("bf16", num_inputs, 0)
    num_panels = -(-num_outputs // PANEL_OUTPUTS)
    panel_bytes, coded_bytes = _panel_bytes("bf16", steps), _panel_bytes("bf16_12", steps)
    codebooks, coded = allocate(num_panels * CODEBOOK_BYTES), allocate(num_panels * coded_bytes)
    escapes: list[Tensor] = []
    num_escapes = 0
    # Not `allocate`: it cuts small buffers from a shared slab, which is freed only with its last buffer.
    panels = torch.empty(min(num_panels, _num_at_once(panel_bytes)) * panel_bytes, dtype=torch.uint8)
    for first, rows_PI in _some_panels(weight_OI, panel_bytes):
        _pack_into(library, "bf16", rows_PI, steps, panels)
        count = -(-len(rows_PI) // PANEL_OUTPUTS)
        tables = codebooks[first * CODEBOOK_BYTES :][: count * CODEBOOK_BYTES]
        call = EncodeArguments(panels.data_ptr(), count, steps, tables.data_ptr(), None, None)
        call_on_threads(library, "choose_codes", call)
        lengths = first_escapes(tables)
        ends = lengths.cumsum(0)
        if num_escapes + int(ends[-1]) > max_escapes * num_outputs * num_inputs:
            return None
        escapes.append(torch.empty(int(ends[-1]), dtype=torch.uint8))
        starts = (ends - lengths).view(count, 2)
        _set_first_escapes(tables, starts)
        call.coded = coded.data_ptr() + first * coded_bytes
        call.escapes = escapes[-1].data_ptr()
        call_on_threads(library, "encode", call)
        _set_first_escapes(tables, starts + num_escapes)
        num_escapes += int(ends[-1])
    all_escapes = allocate(num_escapes + ESCAPE_PADDING)
    torch.cat(escapes, out=all_escapes[:num_escapes])
    bias = _pack_bias(bias_O)
    return NativeLinear("bf16_12", num_inputs, num_outputs, 0, 0, coded, None, None, bias, codebooks, all_escapes)


def _set_first_escapes(codebooks: Tensor, starts_P2: Tensor) -> None:
    codebooks.view(torch.int64).view(len(starts_P2), -1)[:, 2:] = starts_P2


def _panel_bytes(kind: Kind, steps: int) -> int:
    return steps * PANEL_OUTPUTS * WORD_BYTES[kind]


def _num_at_once(panel_bytes: int) -> int:
    """Return the number of panels whose rows are packed together: enough for all threads."""
    return max(PACKED_AT_ONCE_BYTES // panel_bytes, torch.get_num_threads())


def _some_panels(weight_OI: Tensor | StackedRows, panel_bytes: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the rows of some panels, with the number of the first panel."""
    for first in range(0, -(-weight_OI.shape[0] // PANEL_OUTPUTS), at_once := _num_at_once(panel_bytes)):
        start, stop = first * PANEL_OUTPUTS, (first + at_once) * PANEL_OUTPUTS
        yield first, some_rows(weight_OI, start, stop)


def native_form(weight: QuantizedWeight) -> QuantizedWeight | None:
    """Return the weight in the form that the kernels multiply; `None` if there is no such kernel and it must be
    dequantized.

    A weight with one scale per output, whose checkpoint requests 8-bit rows, keeps its row quantization and gets
    float32 scales and minimums. Other weights have groups, whose levels and zeros do not change. Their scales and
    minimums are rounded to float16: an error of at most 2**-11 each, for float32 ones and for products of scales and
    zero points. They are float32 if some are outside of float16's normal range.

    Rows are quantized in the weight's groups: to 8 bits if the checkpoint requests such rows, and otherwise to 12 bits,
    in groups of at most `MAX_INT12_GROUP`, which adds nothing measurable to the loss (docs/adr/0062).

    Float codes keep their codebook and exact scales, in groups of any multiple of 16, and are multiplied as bfloat16.

    Columns that are sorted by group (act-order) stay so, and the inputs are sorted while rows are quantized.
    """
    if weight.order_I is not None and (weight.codebook is not None or _is_channel(weight)):
        return None
    if _is_channel(weight):
        weight = _without_zeros(weight)
        wide_OG = None if weight.minimum_OG is None else weight.minimum_OG.float()
        return replace(weight, scale_OG=weight.scale_OG.float(), minimum_OG=wide_OG)
    if weight.codebook == "e2m1":
        weight = _with_integers(weight)
    if weight.codebook is not None:
        return _with_codes(weight)
    has_wide_rows = weight.row_type is None
    largest = MAX_INT12_GROUP if has_wide_rows else GROUP_SIZES[-1]
    if weight.group_size > largest or weight.group_size not in GROUP_SIZES:
        group_size = largest if weight.is_per_channel else math.gcd(weight.group_size, largest)
        weight = weight.with_groups(group_size)
    weight = _without_zeros(weight)
    minimum_OG = weight.minimum_OG
    fits = fits_float16(weight.scale_OG) and (minimum_OG is None or fits_float16(minimum_OG))
    dtype = torch.float16 if fits else torch.float32
    return replace(
        weight,
        scale_OG=weight.scale_OG.to(dtype),
        minimum_OG=None if minimum_OG is None else minimum_OG.to(dtype),
        row_scale=None,
        row_scaling="int12" if has_wide_rows else "magnitude",
    )


def _with_codes(weight: QuantizedWeight) -> QuantizedWeight | None:
    if weight.codebook == "e4m3" and bool(((weight.levels_OI & 0x7F) == 0x7F).any()):
        return None  # NaN, which the kernels would read as a number
    halves = weight.scale_OG.half()
    return replace(
        weight,
        scale_OG=halves if torch.equal(halves.to(weight.scale_OG.dtype), weight.scale_OG) else weight.scale_OG.float(),
        group_size=channel_group(weight.num_inputs) if weight.is_per_channel else weight.group_size,
        row_type=None,
        row_scale=None,
    )


def _is_channel(weight: QuantizedWeight) -> bool:
    """Return whether rows have one scale each and the sums of all inputs are integers."""
    return (
        weight.row_type in ("int8_token", "int8_tensor")
        and weight.is_per_channel
        and (weight.bits, weight.codebook) == (8, None)
        and weight.num_inputs <= MAX_CHANNEL_INPUTS
    )


def _without_zeros(weight: QuantizedWeight) -> QuantizedWeight:
    """Return a weight with minimums, float32, in place of zero points.

    Zero points of 8 bits are near 128. The offset keeps the minimums small, so rounding them changes values little.
    """
    if weight.zero_OG is None:
        return weight
    offset = 128 if weight.bits == 8 else 0
    minimum_OG = weight.scale_OG.float() * (offset - weight.zero_OG.float())
    return replace(weight, scale_OG=weight.scale_OG.float(), minimum_OG=minimum_OG, zero_OG=None, offset=offset)


def _with_integers(weight: QuantizedWeight) -> QuantizedWeight:
    """Return a weight of e2m1 numbers with integer levels, twice their values plus 12, which changes no value."""
    levels_OI = _HALVES[weight.levels_OI.int()]
    return replace(
        weight,
        levels_OI=levels_OI,
        scale_OG=weight.scale_OG / 2,
        offset=12,
        bits=8,
        codebook=None,
        used_levels=_USED_HALVES,
    )


def pack_quantized(library: NativeLibrary, weight: QuantizedWeight, bias_O: Tensor | None = None) -> NativeLinear:
    """Pack a quantized weight.

    Raises:
        ShapeError: `native_form` returns None for it.
    """
    form = native_form(weight)
    require(form is not None, "linear: no native kernel multiplies with such a quantized weight")
    assert form is not None
    if _is_channel(form):
        return _pack_channels(library, form, bias_O)
    if form.codebook is not None:
        return _pack_codes(library, form, form.codebook, bias_O)
    kind: Kind = "u4" if form.bits == 4 else "u8"
    levels_OI, offset, table = form.levels_OI, form.offset, None
    if form.used_levels is not None and form.minimum_OG is None and form.row_scaling == "int12":
        kind, offset = "u4", offset - form.used_levels[0]
        levels_OI, table = _as_indices(levels_OI, form.used_levels)
    return NativeLinear(
        kind,
        form.num_inputs,
        form.num_outputs,
        form.group_size,
        offset,
        _pack_rows(library, kind, levels_OI, num_steps(kind, form.num_inputs, form.group_size)),
        _pack_scales(library, form.scale_OG),
        None if form.minimum_OG is None else _pack_scales(library, form.minimum_OG),
        _pack_bias(bias_O),
        table,
        order=_pack_order(form.order_I),
        row_scaling=form.row_scaling,
    )


def _as_indices(levels_OI: Tensor, used: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return 4-bit indices of levels, and a buffer of the levels minus the lowest one.

    Products have the bits of those with 8-bit levels, since sums of integers are exact.
    """
    values = torch.tensor(used)
    indices = torch.zeros(256, dtype=torch.uint8)
    indices[values] = torch.arange(len(used), dtype=torch.uint8)
    table = allocate(NUM_LEVELS)
    table[: len(used)] = values - used[0]
    return indices[levels_OI.int()], table


def _pack_channels(library: NativeLibrary, form: QuantizedWeight, bias_O: Tensor | None) -> NativeLinear:
    group_size = channel_group(form.num_inputs)
    return NativeLinear(
        "u8_channel",
        form.num_inputs,
        form.num_outputs,
        group_size,
        form.offset,
        _pack_rows(library, "u8_channel", form.levels_OI, num_steps("u8_channel", form.num_inputs, group_size)),
        _pack_scales(library, form.scale_OG),
        None if form.minimum_OG is None else _pack_scales(library, form.minimum_OG),
        _pack_bias(bias_O),
        row_scaling=form.row_scaling,
        row_scale=form.row_scale,
    )


def _pack_codes(library: NativeLibrary, form: QuantizedWeight, name: Codebook, bias_O: Tensor | None) -> NativeLinear:
    kind: Kind = "e4m3" if name == "e4m3" else "float4"
    numbers = None
    if kind == "float4":
        numbers = allocate(16 * 4)
        numbers.view(torch.float32).copy_(codebook(name))
    return NativeLinear(
        kind,
        form.num_inputs,
        form.num_outputs,
        form.group_size,
        0,
        _pack_rows(library, kind, form.levels_OI, num_steps(kind, form.num_inputs, form.group_size)),
        _pack_scales(library, form.scale_OG),
        None,
        _pack_bias(bias_O),
        numbers,
    )


def call_on_threads(library: NativeLibrary, name: str, arguments: Arguments) -> None:
    """Call the function `octavo_<name>`, which is not part of programs, on torch's number of threads."""
    library.operation(name, type(arguments))  # checks the sizes
    function = library.function(name, [ctypes.c_void_p, ctypes.c_int64])
    function(ctypes.addressof(arguments), torch.get_num_threads())


def _pack_rows(library: NativeLibrary, kind: Kind, rows_ON: Tensor, steps: int) -> Tensor:
    """Return `steps` words of each row as panels."""
    panels = allocate(-(-len(rows_ON) // PANEL_OUTPUTS) * _panel_bytes(kind, steps))
    _pack_into(library, kind, rows_ON, steps, panels)
    return panels


def _pack_into(library: NativeLibrary, kind: Kind, rows_ON: Tensor, steps: int, panels: Tensor) -> None:
    """Write `steps` words of each row as panels."""
    rows_ON = rows_ON if rows_ON.stride(1) == 1 else rows_ON.contiguous()
    num_outputs, num_numbers = rows_ON.shape
    row_bytes = rows_ON.stride(0) * rows_ON.element_size()
    call = PackArguments(
        rows_ON.data_ptr(), row_bytes, num_numbers, num_outputs, steps, panels.data_ptr(), KINDS.index(kind), 0
    )
    call_on_threads(library, "pack", call)


def _pack_scales(library: NativeLibrary, values_OG: Tensor) -> Tensor:
    kind: Kind = "f32" if values_OG.dtype == torch.float32 else "f16"
    return _pack_rows(library, kind, values_OG, values_OG.shape[1])


def _pack_order(order_I: Tensor | None) -> Tensor | None:
    if order_I is None:
        return None
    buffer = allocate(len(order_I) * 4)
    buffer.view(torch.int32).copy_(order_I)
    return buffer


def _pack_bias(bias_O: Tensor | None) -> Tensor | None:
    if bias_O is None:
        return None
    buffer = allocate(-(-len(bias_O) // PANEL_OUTPUTS) * PANEL_OUTPUTS * 4)
    values = buffer.view(torch.float32)
    values.zero_()
    values[: len(bias_O)] = bias_O
    return buffer
