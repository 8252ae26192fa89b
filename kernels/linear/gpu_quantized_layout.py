"""Quantized weights as the kernel of `gpu_quantized_kernels` reads them: made once, at load. Multiplies nothing.

A weight is divided into tiles of 128 outputs and blocks of inputs; what a program reads at once lies together, so it
needs no descriptors and no masks. A block is some chunks of inputs, in 16-bit words of four codes of 4 bits, or two of
8: the j-th codes of the words of a block are its chunk j, so a shift and a mask make a chunk of all words, for two of
them in one instruction. Numbers that are multiplied as they are lie as bytes, one chunk in a block.

Scales lie by group and output, in words of 32 bits, which are the smallest that can be copied while a tile before is
multiplied: a float32; or 16 bits with the zero or minimum of the group; or 16 bits each of two adjacent groups.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from octavo.kernels.linear.quantized import GROUP_MULTIPLE, QuantizedWeight

TILE_OUTPUTS = 128
"""Outputs of a tile, in memory and of a program."""

Kind = Literal["u4", "e2m1", "u8", "e4m3", "s8", "f8"]
"""Codes of 4 or 8 bits that become numbers of the rows' type; or numbers of 8 bits, which are multiplied by rows of the
same type: `s8` and `f8`."""
Other = Literal["none", "shift", "minimum"]
"""What a group has beside its scale. `shift`: what is subtracted from its levels."""

_CHUNK = 32
_CHUNK_OF_PRODUCTS = 128
"""Of `s8` and `f8`: 128 bytes."""
_GROUP_OF_OUTPUTS = 128
"""Inputs of a group where each output has a zero or a minimum beside its scale."""
_BASES = {torch.bfloat16: 0x4300, torch.float16: 0x6400}
"""The bits of the first number whose unit is 1 in the last place: 128 and 1024."""
_FLOAT_UNITS = {("e2m1", torch.bfloat16): 2.0**126, ("e2m1", torch.float16): 2.0**14}
"""What a code is multiplied by after its bits were put where those of a number are."""
_E4M3_UNIT = 2.0**120


@dataclass(frozen=True, slots=True, eq=False)
class GpuQuantizedWeight:
    """A packed weight."""

    kind: Kind
    num_outputs: int
    num_inputs: int
    dtype: torch.dtype
    """Of the rows: bfloat16 or float16."""
    words: Tensor
    """int16 or bytes; shape (tiles, blocks, [chunks,] 128, chunk)."""
    scales: Tensor
    """int32 words, shape (words, outputs of all tiles)."""
    scale_dtype: torch.dtype
    group_size: int
    """0: one scale per output, of float32."""
    other: Other
    zero: int
    """The level that means zero, unless groups have shifts."""
    chunk: int
    num_chunks: int
    order_I: Tensor | None
    """int32: which input each column multiplies."""
    row_scale: float | None
    """Of all rows, if the checkpoint has one; else each row has its own. For `s8` and `f8`."""

    @property
    def num_blocks(self) -> int:
        """Blocks of inputs."""
        return self.words.shape[1]

    @property
    def num_bytes(self) -> int:
        """In memory."""
        tensors = (self.words, self.scales) if self.order_I is None else (self.words, self.scales, self.order_I)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def pack(
    weight: QuantizedWeight, dtype: torch.dtype, device: torch.device, *, has_float8: bool
) -> GpuQuantizedWeight | None:
    """Return the packed form on a device; None: no kernel multiplies with this format, it must be dequantized.

    Args:
        weight: of any device.
        dtype: of the rows.
        device: for the packed form.
        has_float8: whether the GPU multiplies matrices of float8_e4m3fn; without, such weights become numbers of the
            rows' type, and rows are not quantized.
    """
    if not weight.is_per_channel:
        # Chunks of a block begin groups at fixed places.
        weight = weight.with_groups(weight.group_size & -weight.group_size)
        group_size = weight.group_size
    elif weight.minimum_OG is not None or weight.zero_OG is not None:
        weight, group_size = weight.with_groups(_GROUP_OF_OUTPUTS), _GROUP_OF_OUTPUTS
    else:
        group_size = 0
    kind = _kind_of(weight, group_size, has_float8=has_float8)
    if kind is None or dtype not in _BASES:
        return None
    chunk, num_chunks = chunks_of(kind, group_size)
    num_inputs = -(-weight.num_inputs // (chunk * num_chunks)) * chunk * num_chunks
    num_outputs = -(-weight.num_outputs // TILE_OUTPUTS) * TILE_OUTPUTS
    scaled = _scales(weight, kind, dtype, group_size, device)
    if scaled is None:
        return None
    scales, scale_dtype, other = scaled
    span = group_size if scale_dtype == torch.float32 or other != "none" else 2 * group_size
    num_words = -(-num_inputs // span) if span else 1
    padded = torch.zeros(num_words, num_outputs, dtype=torch.int32, device=device)
    padded[: scales.shape[0], : scales.shape[1]] = scales
    return GpuQuantizedWeight(
        kind=kind,
        num_outputs=weight.num_outputs,
        num_inputs=weight.num_inputs,
        dtype=dtype,
        words=_words(weight.levels_OI.to(device), kind, num_outputs, num_inputs, chunk, num_chunks),
        scales=padded,
        scale_dtype=scale_dtype,
        group_size=group_size,
        other=other,
        zero=weight.offset,
        chunk=chunk,
        num_chunks=num_chunks,
        order_I=None if weight.order_I is None else weight.order_I.to(device=device, dtype=torch.int32),
        row_scale=weight.row_scale,
    )


def _kind_of(weight: QuantizedWeight, group_size: int, *, has_float8: bool) -> Kind | None:
    row_type = weight.row_type or ""
    if weight.codebook == "e4m3":
        has_chunks = group_size % _CHUNK_OF_PRODUCTS == 0
        return "f8" if has_float8 and row_type.startswith("fp8") and has_chunks else "e4m3"
    if weight.codebook is not None:
        return "e2m1" if weight.codebook == "e2m1" else None
    if weight.bits == 4:
        return "u4"
    is_symmetric = weight.minimum_OG is None and weight.zero_OG is None and weight.offset == 128
    return "s8" if row_type.startswith("int8") and is_symmetric and not group_size else "u8"


def chunks_of(kind: Kind, group_size: int) -> tuple[int, int]:
    """Return the inputs of a chunk, all of one group, and the chunks of a block."""
    if kind in ("s8", "f8"):
        return _CHUNK_OF_PRODUCTS, 1
    return (_CHUNK if group_size % _CHUNK == 0 else GROUP_MULTIPLE), (4 if kind in ("u4", "e2m1") else 2)


def _words(levels_OI: Tensor, kind: Kind, num_outputs: int, num_inputs: int, chunk: int, num_chunks: int) -> Tensor:
    """Return the codes of padded outputs and inputs in the order of the kernel."""
    codes = torch.zeros(num_outputs, num_inputs, dtype=torch.uint8, device=levels_OI.device)
    codes[: levels_OI.shape[0], : levels_OI.shape[1]] = levels_OI
    codes = codes.view(num_outputs // TILE_OUTPUTS, TILE_OUTPUTS, -1, num_chunks, chunk)
    if kind in ("s8", "f8"):
        words = codes.permute(0, 2, 3, 1, 4).squeeze(2).contiguous()
        return (words ^ 0x80).view(torch.int8) if kind == "s8" else words.view(torch.float8_e4m3fn)
    chunks = codes.permute(3, 0, 2, 1, 4).unbind(0)
    if num_chunks == 4:
        chunks = (chunks[0] | (chunks[1] << 4), chunks[2] | (chunks[3] << 4))
    return torch.stack(chunks, dim=-1).view(torch.int16).squeeze(-1)


def _scales(
    weight: QuantizedWeight, kind: Kind, dtype: torch.dtype, group_size: int, device: torch.device
) -> tuple[Tensor, torch.dtype, Other] | None:
    """Return the words of scales by group and output, the type of scales and what is beside them; None: a scale is too
    large for its type."""
    scale_GO = weight.scale_OG.to(device).T
    # A word with the scales of two blocks would cost more instructions than bytes.
    has_shifts = weight.zero_OG is not None or (kind in ("u4", "u8") and group_size >= _GROUP_OF_OUTPUTS)
    other: Other = "shift" if has_shifts else "none"
    if weight.minimum_OG is not None:
        other = "minimum"
    if not group_size:
        return _float_words(scale_GO), torch.float32, other
    if kind == "e2m1":
        scale_GO = scale_GO.float() * _FLOAT_UNITS[kind, dtype]
    if kind == "f8" or (kind == "e4m3" and weight.scale_OG.dtype == torch.float32):
        is_fitting = bool((scale_GO.float().abs() < 2.0**7).all())
        return (_float_words(scale_GO), torch.float32, other) if is_fitting else None
    scale_dtype = dtype if kind in ("u4", "e2m1") else _exact_type(scale_GO)
    halves_GO = scale_GO.to(scale_dtype)
    if not bool(halves_GO.isfinite().all()):
        return None
    if other == "none":
        if len(halves_GO) % 2:
            halves_GO = torch.cat([halves_GO, torch.zeros_like(halves_GO[:1])])
        return _pairs(halves_GO[::2], halves_GO[1::2]), scale_dtype, other
    if weight.minimum_OG is not None:
        return _pairs(halves_GO, weight.minimum_OG.to(device).T.to(scale_dtype)), scale_dtype, other
    zero_GO = torch.full_like(halves_GO, weight.offset) if weight.zero_OG is None else weight.zero_OG.to(device).T
    base = 0 if kind == "u8" else torch.tensor(_BASES[dtype], dtype=torch.int16).view(dtype).item()
    return _pairs(halves_GO, (zero_GO.float() + base).to(scale_dtype)), scale_dtype, other


def _exact_type(scale_GO: Tensor) -> torch.dtype:
    """Return the type of 16 bits that holds scales best: their own, or that of float32 ones with the larger range."""
    if scale_GO.dtype != torch.float32:
        return scale_GO.dtype
    magnitudes = scale_GO.abs()
    is_in_range = magnitudes.max() < torch.finfo(torch.float16).max
    is_normal = magnitudes[magnitudes > 0].amin() >= torch.finfo(torch.float16).smallest_normal
    return torch.float16 if bool(is_in_range) and bool(is_normal) else torch.bfloat16


def _float_words(values_GO: Tensor) -> Tensor:
    return values_GO.float().contiguous().view(torch.int32)


def _pairs(lower: Tensor, upper: Tensor) -> Tensor:
    return torch.stack([lower, upper], dim=-1).contiguous().view(torch.int32).squeeze(-1)


def assembly(kind: Kind, dtype: torch.dtype) -> tuple[str, ...] | None:
    """Return instructions that make the bits of a chunk's numbers from words, two words at once; one for each chunk.

    PTX has no shift of two halves, and the compiler would make seven instructions where these are two or four.
    """
    if kind == "u4":
        base = _BASES[dtype] * 0x10001
        return tuple(
            f"{{ .reg .b32 t; shr.b32 t, $1, {4 * chunk}; lop3.b32 $0, t, 0x000f000f, {base}, 0xea; }}"
            for chunk in range(4)
        )
    if kind == "e2m1":
        mask = (7 << (6 if dtype == torch.bfloat16 else 9)) * 0x10001
        place = 6 if dtype == torch.bfloat16 else 9
        return tuple(
            f"{{ .reg .b32 t, s; {_shift('t', place - 4 * chunk)} {_shift('s', 12 - 4 * chunk)} "
            f"and.b32 s, s, 0x80008000; lop3.b32 $0, t, {mask}, s, 0xea; }}"
            for chunk in range(4)
        )
    if kind == "u8":  # the bytes of 2^23 in float32, with a code in place of the lowest
        return tuple(
            f"prmt.b32 $0, $2, 0x4b000000, {0x7540 + chunk}; prmt.b32 $1, $2, 0x4b000000, {0x7542 + chunk};"
            for chunk in range(2)
        )
    if kind == "e4m3":  # an arithmetic shift keeps the sign
        return tuple(
            " ".join(
                f"{{ .reg .b32 t; prmt.b32 t, $2, 0, {0x0444 + ((2 * place + chunk) << 12)}; shr.s32 t, t, 4; "
                f"and.b32 ${place}, t, 0x87f00000; }}"
                for place in range(2)
            )
            for chunk in range(2)
        )
    return None


def _shift(register: str, count: int) -> str:
    """Return the instruction that shifts the word to the left, or to the right if the count is negative."""
    return f"sh{'l' if count >= 0 else 'r'}.b32 {register}, $1, {abs(count)};"
