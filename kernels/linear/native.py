"""`linear` in C++: packed weights, mirrored from `packed.h`, and the arguments of the operation. Packs nothing.

A packed weight is a small header and flat buffers, so that it can be stored in a memory-mapped file.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self, TypedDict, get_args

import torch
from torch import Tensor

from octavo.kernels.linear.quantized import GROUP_MULTIPLE, GROUP_SIZES, is_permutation
from octavo.kernels.native.arguments import TYPES, Arguments, Matrix, Panels
from octavo.kernels.native.direct import run
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.value import Form
from octavo.kernels.quantize.native import quantize_rows
from octavo.kernels.quantize.scaling import SCALINGS, Scaling, level_type

Kind = Literal["bf16", "f32", "f16", "u8", "u4", "bf16_12", "u8_channel", "e4m3", "float4"]
KINDS: tuple[Kind, ...] = ("bf16", "f32", "f16", "u8", "u4", "bf16_12", "u8_channel", "e4m3", "float4")
"""Kinds in the order of `octavo::Kind`. bf16_12 holds bfloat16 without loss in 12 bits plus a few escaped bytes.
u8_channel has one scale for each output. e4m3 and float4 hold float codes, which are multiplied as bfloat16."""
DTYPES: dict[Kind, torch.dtype] = {"bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}
"""Dtypes of weights that are packed element by element."""
WORD_INPUTS: dict[Kind, int] = {
    "bf16": 2,
    "f32": 1,
    "f16": 1,
    "u8": 4,
    "u4": 8,
    "bf16_12": 2,
    "u8_channel": 4,
    "e4m3": 2,
    "float4": 2,
}
"""Inputs in one word of a panel."""
WORD_BYTES: dict[Kind, int] = {
    "bf16": 4,
    "f32": 4,
    "f16": 2,
    "u8": 4,
    "u4": 4,
    "bf16_12": 3,
    "u8_channel": 4,
    "e4m3": 2,
    "float4": 1,
}
PANEL_OUTPUTS = 64
Header = dict[str, int | float | str]
"""Metadata of a packed weight, without its buffers."""
QUANTIZED: frozenset[Kind] = frozenset({"u8", "u4", "u8_channel"})
"""Kinds whose rows are quantized before the product."""
FLOAT_CODES: frozenset[Kind] = frozenset({"e4m3", "float4"})
CHANNEL_MULTIPLE = 64
"""Inputs of a weight with one scale per output are padded to a multiple of this, and form one group."""
MAX_INT12_GROUP = 32
"""Maximum inputs that share a scale if rows have 12 bits: 32 * 255 * 2047 is below 2^24, so floats hold each sum of
products exactly."""
NUM_LEVELS = 16
"""Entries of a codebook of u4."""
NUM_SEGMENTS = (1, 2, 4, 8)
CODEBOOK_BYTES = 32
"""See `Codebook` in `packed.h`: 16 bytes, and the int64 offsets of the escapes of the panel's two halves."""

Epilogue = Literal["none", "silu_and_mul", "gelu", "gelu_tanh", "relu", "gelu_and_mul", "gelu_tanh_and_mul"]
EPILOGUES: tuple[Epilogue, ...] = get_args(Epilogue)
"""Epilogues in the order of `octavo::Epilogue`."""
GATED_EPILOGUES: frozenset[Epilogue] = frozenset({"silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"})
"""Epilogues whose outputs are gates and ups; half as many columns are written."""


class PackedWeight(ctypes.Structure):
    """See `PackedWeight` in `packed.h`."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("minimums", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("codebooks", ctypes.c_void_p),
        ("escapes", ctypes.c_void_p),
        ("num_inputs", ctypes.c_int64),
        ("num_outputs", ctypes.c_int64),
        ("group_size", ctypes.c_int64),
        ("num_segments", ctypes.c_int64),
        ("offset", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("scale_type", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class LinearArguments(Arguments):
    """See `LinearArgs`."""

    _fields_ = (
        ("x", Matrix),
        ("x_scales", Matrix),
        ("x_sums", Matrix),
        ("weight", PackedWeight),
        ("residual", Matrix),
        ("out", Matrix),
        ("epilogue", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True, eq=False)
class NativeLinear:
    """A packed weight and its bias. The buffers are flat, uint8, and begin at multiples of 64 bytes."""

    kind: Kind
    num_inputs: int
    num_outputs: int
    group_size: int
    """Inputs that share a scale; 0 without scales."""
    offset: int
    weight: Tensor
    """The panels."""
    scales: Tensor | None
    minimums: Tensor | None
    bias: Tensor | None
    codebooks: Tensor | None = None
    """For bf16_12: one table per panel. For float4: the values of the 16 codes, float32. For u4: the 16 levels whose
    indices the panels hold, uint8, the first one 0, for rows of 12 bits; `None` if the panels hold the levels
    themselves."""
    escapes: Tensor | None = None
    """For bf16_12: the upper bytes that are not in the codebooks; at least one byte."""
    order: Tensor | None = None
    """For u8 and u4: the input that each column multiplies, int32 (GPTQ's act-order); `None` if they are in order."""
    row_scaling: Scaling = field(default="magnitude", kw_only=True)
    """How rows are quantized."""
    row_scale: float | None = field(default=None, kw_only=True)
    """Static scale of all rows of u8_channel; `None` if each row has its own."""
    num_segments: int = field(default=1, kw_only=True)
    """Equal parts of the inputs that are summed separately and then added as in a binary tree: 1, 2, 4 or 8."""

    @property
    def is_quantized(self) -> bool:
        """Whether rows must be quantized before the product."""
        return self.kind in QUANTIZED

    @property
    def has_row_scales(self) -> bool:
        """Whether each row has one scale, and the inputs are summed in one segment."""
        return self.kind == "u8_channel"

    @property
    def _has_wide_scales(self) -> bool:
        """Whether scales and minimums are float32; otherwise float16."""
        return _are_wide(self.scales, self.num_inputs, self.num_outputs, self.group_size)

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the rows that it was packed for; `None` if any float, which is rounded as the kind needs it."""
        return torch.bfloat16 if self.kind == "bf16_12" else DTYPES.get(self.kind)

    @property
    def segment_multiple(self) -> int:
        """The inputs of a segment must be a multiple of this."""
        return self.group_size if self.is_quantized else WORD_INPUTS[self.kind]

    @property
    def input_form(self) -> Form:
        """How the rows that are multiplied must be stored."""
        if self.is_quantized:
            levels = level_type(self.row_scaling)
            return Form(levels, self.group_size, _address(self.order), self.row_scaling, self.row_scale)
        return Form(torch.float32 if self.kind in ("f32", "f16") else torch.bfloat16)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.to_buffers()[1].values())

    def to_buffers(self) -> tuple[Header, dict[str, Tensor]]:
        """Return a header of numbers and names, and the existing buffers, for `from_buffers`."""
        header: Header = {
            "kind": self.kind,
            "num_inputs": self.num_inputs,
            "num_outputs": self.num_outputs,
            "group_size": self.group_size,
            "offset": self.offset,
            "num_segments": self.num_segments,
            "row_scaling": self.row_scaling,
            "row_scale": self.row_scale or 0.0,
        }
        names = ("weight", "scales", "minimums", "bias", "codebooks", "escapes", "order")
        buffers = {name: getattr(self, name) for name in names}
        return header, {name: buffer for name, buffer in buffers.items() if buffer is not None}

    @classmethod
    def from_buffers(cls, header: Header, buffers: dict[str, Tensor]) -> Self:
        """Return the weight over buffers that are aligned to 64 bytes, without a copy.

        Raises:
            ValueError: the header, the buffer sizes, the offsets in the codebooks or the order are invalid.
        """
        kind = next((kind for kind in KINDS if kind == header.get("kind")), None)
        numbers = [header.get(name) for name in ("num_inputs", "num_outputs", "group_size", "offset", "num_segments")]
        if kind is None or not all(isinstance(number, int) for number in numbers):
            raise ValueError(f"not the header of a packed weight: {header}")
        num_inputs, num_outputs, group_size, offset, num_segments = (int(number or 0) for number in numbers)
        is_whole = _is_group_size(kind, num_inputs, group_size) and (
            num_segments == 1
            or (
                num_segments in NUM_SEGMENTS
                and kind != "u8_channel"
                and num_inputs % (num_segments * (group_size if kind in QUANTIZED else WORD_INPUTS[kind])) == 0
            )
        )
        if min(num_inputs, num_outputs) < 1 or not is_whole:
            raise ValueError(f"not the header of a packed weight: {header}")
        num_panels = -(-num_outputs // PANEL_OUTPUTS)
        scale_bytes = (
            4 if kind == "u8_channel" or _are_wide(buffers.get("scales"), num_inputs, num_outputs, group_size) else 2
        )
        sizes = {"weight": num_panels * panel_bytes(kind, num_inputs, group_size), "bias": num_panels * 256}
        needed = {"weight"}
        if group_size:
            num_groups = -(-num_inputs // group_size)
            sizes["scales"] = sizes["minimums"] = num_panels * num_groups * PANEL_OUTPUTS * scale_bytes
            needed.add("scales")
        if kind in ("u8", "u4"):
            sizes["order"] = num_inputs * 4
        if kind == "u4" and header.get("row_scaling") == "int12" and "minimums" not in buffers:
            sizes["codebooks"] = NUM_LEVELS
        if kind == "float4":
            sizes["codebooks"] = 16 * 4
            needed.add("codebooks")
        if kind == "bf16_12":
            sizes["codebooks"] = num_panels * CODEBOOK_BYTES
            sizes["escapes"] = buffers["escapes"].nbytes if "escapes" in buffers else 0
            needed |= {"codebooks", "escapes"}
        if not needed <= set(buffers) or any(buffer.nbytes != sizes.get(name) for name, buffer in buffers.items()):
            found = {name: buffer.nbytes for name, buffer in buffers.items()}
            raise ValueError(f"buffers of {found} bytes for a packed weight of {sizes}")
        parts = [buffers.get(name) for name in ("scales", "minimums", "bias", "codebooks", "escapes", "order")]
        order = buffers.get("order")
        if order is not None and not is_permutation(order.view(torch.int32)):
            raise ValueError(f"an order of {num_inputs} inputs that does not have each of them once")
        rows = _rows_of(header, kind)
        panels = buffers["weight"]
        packed = cls(
            kind, num_inputs, num_outputs, group_size, offset, panels, *parts, num_segments=num_segments, **rows
        )
        if kind == "bf16_12":
            starts = first_escapes(buffers["codebooks"])
            if int(starts[0]) != 0 or bool((starts.diff() < 0).any()) or int(starts[-1]) > buffers["escapes"].nbytes:
                raise ValueError(f"escapes that begin at {int(starts.min())}..{int(starts.max())}, not in order")
        return packed

    def panels(self, epilogue: Epilogue) -> Panels:
        """Return the panels that the threads divide among themselves: all, or those of the gates."""
        count = -(-self.num_outputs // PANEL_OUTPUTS)
        panel_bytes = self.weight.nbytes // count
        return Panels(self.weight.data_ptr(), count // 2 if epilogue in GATED_EPILOGUES else count, panel_bytes)

    def structure(self) -> PackedWeight:
        """Return the structure for C++. It points into the buffers and does not keep them alive."""
        return PackedWeight(
            self.weight.data_ptr(),
            _address(self.scales),
            _address(self.minimums),
            _address(self.bias),
            _address(self.codebooks),
            _address(self.escapes),
            self.num_inputs,
            self.num_outputs,
            self.group_size,
            self.num_segments,
            self.offset,
            KINDS.index(self.kind),
            TYPES[torch.float32 if self._has_wide_scales else torch.float16],
            0,
        )


@dataclass(frozen=True, slots=True, eq=False)
class NativeProduct:
    """A packed weight that multiplies tensors, outside of any program."""

    library: NativeLibrary
    packed: NativeLinear

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See `octavo.kernels.linear.linear`."""
        out_TO = x_TI.new_empty(x_TI.shape[0], self.packed.num_outputs)
        self.multiply(x_TI, out_TO, torch.get_num_threads())
        return out_TO

    def multiply(self, x_TI: Tensor, out_TO: Tensor, num_threads: int) -> None:
        """Write the product into `out`, whose rows are contiguous, in the dtype of `x`."""
        rows_TI = x_TI.float() if x_TI.dtype == torch.float16 else x_TI
        rows_TI = rows_TI if rows_TI.stride(1) == 1 else rows_TI.contiguous()
        result_TO = out_TO if out_TO.dtype == rows_TI.dtype else torch.empty_like(out_TO, dtype=rows_TI.dtype)
        inputs = [rows_TI.bfloat16() if self.packed.input_form.type == torch.bfloat16 else rows_TI]
        if self.packed.is_quantized:
            quantized = quantize_rows(self.library, rows_TI, self.packed.input_form, num_threads)
            inputs = [quantized.levels_TI, quantized.scale_TG, quantized.sum_TG]
        call = arguments([Matrix.of(tensor) for tensor in inputs], self.packed, Matrix.of(result_TO))
        run(self.library, "linear", call, num_rows=x_TI.shape[0], num_threads=num_threads)
        if result_TO is not out_TO:
            out_TO.copy_(result_TO)


def arguments(
    x: Sequence[Matrix],
    packed: NativeLinear,
    out: Matrix,
    *,
    epilogue: Epilogue = "none",
    residual: Matrix | None = None,
) -> LinearArguments:
    """Return the arguments of the operation.

    Args:
        x: the rows in the form `packed.input_form`. If quantized: levels, scales and sums.
        packed: must outlive the arguments.
        out: float32 or bfloat16.
        epilogue: see `can_fuse`.
        residual: float32, added to the result of the epilogue; may be `out`.
    """
    assert len(x) == (3 if packed.is_quantized else 1), "quantized weights take levels, scales and sums"
    assert can_fuse(epilogue, packed), f"{epilogue} after {packed.num_outputs} outputs"
    nothing = Matrix()
    levels, scales, sums = x if packed.is_quantized else (*x, nothing, nothing)
    structure = packed.structure()
    return LinearArguments(levels, scales, sums, structure, residual or nothing, out, EPILOGUES.index(epilogue), 0)


def can_fuse(epilogue: Epilogue, packed: NativeLinear) -> bool:
    """Return whether the operation can apply `epilogue`: the gates and the ups must each begin at a panel."""
    return epilogue not in GATED_EPILOGUES or packed.num_outputs % (2 * PANEL_OUTPUTS) == 0


def panel_bytes(kind: Kind, num_inputs: int, group_size: int) -> int:
    """Return the bytes of one panel."""
    return num_steps(kind, num_inputs, group_size) * PANEL_OUTPUTS * WORD_BYTES[kind]


def first_escapes(codebooks: Tensor) -> Tensor:
    """Return the offsets of the escapes of each half of each panel, int64."""
    return codebooks.view(torch.int64).view(-1, CODEBOOK_BYTES // 8)[:, 2:].flatten()


def num_steps(kind: Kind, num_inputs: int, group_size: int) -> int:
    """Return the number of words of one output."""
    padded = -(-num_inputs // group_size) * group_size if kind in QUANTIZED else num_inputs
    return -(-padded // WORD_INPUTS[kind])


def channel_group(num_inputs: int) -> int:
    """Return the number of inputs of the only group of a weight with one scale per output."""
    return -(-num_inputs // CHANNEL_MULTIPLE) * CHANNEL_MULTIPLE


def _is_group_size(kind: Kind, num_inputs: int, group_size: int) -> bool:
    if kind == "u8_channel":
        return group_size == channel_group(num_inputs)
    if kind in FLOAT_CODES:
        return group_size > 0 and group_size % GROUP_MULTIPLE == 0
    return group_size in (GROUP_SIZES if kind in QUANTIZED else (0,))


def _are_wide(scales: Tensor | None, num_inputs: int, num_outputs: int, group_size: int) -> bool:
    if scales is None:
        return False
    num_scales = -(-num_outputs // PANEL_OUTPUTS) * PANEL_OUTPUTS * -(-num_inputs // group_size)
    return scales.nbytes == num_scales * 4


class _Rows(TypedDict):
    """How rows are quantized."""

    row_scaling: Scaling
    row_scale: float | None


def _rows_of(header: Header, kind: Kind) -> _Rows:
    scaling = next((scaling for scaling in SCALINGS if scaling == header.get("row_scaling")), None)
    scale = header.get("row_scale")
    if scaling is None or not isinstance(scale, float) or (scale and kind != "u8_channel"):
        raise ValueError(f"not the header of a packed weight: {header}")
    if scaling == "int12" and (kind not in ("u8", "u4") or int(header["group_size"]) > MAX_INT12_GROUP):
        raise ValueError(f"not the header of a packed weight: {header}")
    return {"row_scaling": scaling, "row_scale": scale or None}


def _address(buffer: Tensor | None) -> int | None:
    return None if buffer is None else buffer.data_ptr()
