"""Quantized weights as the kernel of `gpu_quantized_kernels` reads them: made once, at load. Multiplies nothing.

A weight is divided into tiles of 128 outputs and blocks of inputs; what a program reads at once lies together, so it
needs no descriptors and no masks. A block is some chunks of inputs, in 16-bit words of four codes of 4 bits, or two of
8: the j-th codes of the words of a block are its chunk j, so one or two instructions make a chunk of two words. Numbers
that are multiplied as they are lie as bytes, one chunk in a block.

The bits of a code of 4 bits lie where a mask, after at most one rotation, leaves those of a number. Where the exponent
of a bfloat16 is 0 or 1, its lowest 8 bits count units of 2^-133: integers are such numbers, and one product and sum
(`fma`) with a large scale makes weights of them. So that such scales are bfloat16 too, weights are 2^16 times too
small, and sums are multiplied by that at the end; both are exact.

The scales of a tile lie by group and output, in words of 32 bits, which are the smallest that can be copied while a
tile before is multiplied: a float32; or 16 bits with the zero or minimum of the group; or 16 bits each of two adjacent
groups. If a block has several words of an output, two adjacent ones are read at once.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from octavo.kernels.linear.quantized import GROUP_MULTIPLE, QuantizedWeight, fits_float16
from octavo.kernels.quantize.scaling import Scaling

TILE_OUTPUTS = 128
"""Outputs of a tile, in memory and of a program."""

Kind = Literal["u4", "e2m1", "u8", "e4m3", "s8", "f8"]
"""Codes of 4 or 8 bits that become numbers of the rows' type; or numbers of 8 bits, which are multiplied by rows of the
same type: `s8` and `f8`."""
Other = Literal["none", "shift", "minimum"]
"""What a group has beside its scale. `shift`: what is subtracted from its levels."""

ROW_TYPES = (torch.bfloat16, torch.float16)
_CHUNK = 32
_CHUNK_OF_PRODUCTS = 128
"""Of `s8` and `f8`: 128 bytes."""
_GROUP_OF_OUTPUTS = 128
"""Inputs of a group where each output has a zero or a minimum beside its scale."""
BASES = {("u4", torch.float16): 0x6400}
"""Bits of each number beside those of its code: 1024, whose unit is 1 in the last place."""
_UNITS = {
    ("u4", torch.bfloat16): (2.0**117, 2.0**16),
    ("u8", torch.bfloat16): (2.0**117, 2.0**16),
    ("e2m1", torch.bfloat16): (2.0**110, 2.0**16),
    ("e2m1", torch.float16): (2.0**14, 1.0),
}
"""What scales are multiplied by, because codes are numbers so small; and sums."""

Piece = tuple[int, int]
"""How far two adjacent words are rotated to the left, as one of 32 bits, and the bits of each that are the code's."""
_U4, _FULL = 0x000F, 0xFFFFFFFF
_PIECES: dict[tuple[Kind, torch.dtype], tuple[tuple[Piece, ...], ...]] = {
    ("u4", torch.bfloat16): (((0, _U4),), ((0, _U4 << 4),), ((24, _U4),), ((24, _U4 << 4),)),
    ("u4", torch.float16): (((0, _U4),), ((28, _U4),), ((24, _U4),), ((20, _U4),)),
    # Sign, exponent and the upper bit of the fraction: as few instructions as any order of the bits needs.
    ("e2m1", torch.bfloat16): (((0, 0x81C0),), ((26, 0x81C0),), ((22, 0x81C0),), ((28, 0x80C0), (20, 0x0100))),
    ("e2m1", torch.float16): (
        ((0, 0x8E00),),
        ((19, 0x8E00),),
        ((26, 0x8C00), (23, 0x0200)),
        ((28, 0x8600), (23, 0x0800)),
    ),
    ("u8", torch.bfloat16): (((0, 0x00FF),), ((24, 0x00FF),)),  # if scales multiply the sums, not the numbers
}
"""Of each chunk: the bits of its codes, ascending, are those of the masks of its pieces."""
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
    """int32 words, shape (tiles, words or pairs of words, 128, 1 or 2): pairs if a block has several."""
    scale_dtype: torch.dtype
    group_size: int
    """0: one scale per output, of float32."""
    other: Other
    zero: int
    """The level that means zero, unless groups have shifts."""
    unit: float
    """What scales are multiplied by; of those of outputs the kernel does it."""
    sum_unit: float
    """What sums are multiplied by."""
    chunk: int
    num_chunks: int
    order_I: Tensor | None
    """int32: which input each column multiplies."""
    row_scale: float | None
    """Of all rows, if the checkpoint has one; else each row has its own. For `s8` and `f8`."""
    row_scaling: Scaling
    """Of rows for `s8`."""

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
        weight: weight on any device.
        dtype: data type of the rows.
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
    if kind is None or dtype not in ROW_TYPES:
        return None
    chunk, num_chunks = chunks_of(kind, group_size)
    num_inputs = -(-weight.num_inputs // (chunk * num_chunks)) * chunk * num_chunks
    num_outputs = -(-weight.num_outputs // TILE_OUTPUTS) * TILE_OUTPUTS
    scaled = _scales(weight, kind, dtype, group_size, device)
    if scaled is None:
        return None
    scales, scale_dtype, other = scaled
    unit, sum_unit = units_of(kind, dtype, group_size)
    span = group_size if scale_dtype == torch.float32 or other != "none" else 2 * group_size
    num_words = -(-num_inputs // span) if span else 1
    padded = torch.zeros(num_words, num_outputs, dtype=torch.int32, device=device)
    padded[: scales.shape[0], : scales.shape[1]] = scales
    adjacent = 2 if span and chunk * num_chunks > span else 1
    padded = padded.view(num_words // adjacent, adjacent, num_outputs // TILE_OUTPUTS, TILE_OUTPUTS)
    return GpuQuantizedWeight(
        kind=kind,
        num_outputs=weight.num_outputs,
        num_inputs=weight.num_inputs,
        dtype=dtype,
        words=_words(weight.levels_OI.to(device), kind, dtype, num_outputs, num_inputs, chunk, num_chunks),
        scales=padded.permute(2, 0, 3, 1).contiguous(),
        scale_dtype=scale_dtype,
        group_size=group_size,
        other=other,
        zero=weight.offset,
        unit=unit,
        sum_unit=sum_unit,
        chunk=chunk,
        num_chunks=num_chunks,
        order_I=None if weight.order_I is None else weight.order_I.to(device=device, dtype=torch.int32),
        row_scale=weight.row_scale,
        row_scaling=weight.row_scaling,
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


def pieces_of(kind: Kind, dtype: torch.dtype, group_size: int) -> tuple[tuple[Piece, ...], ...]:
    """Return the pieces of each chunk's codes; empty: numbers are made of 8 bits in float32, or not at all."""
    return () if kind == "u8" and group_size else _PIECES.get((kind, dtype), ())


def units_of(kind: Kind, dtype: torch.dtype, group_size: int) -> tuple[float, float]:
    """Return what scales are multiplied by, and what sums are."""
    return _UNITS.get((kind, dtype), (1.0, 1.0)) if pieces_of(kind, dtype, group_size) else (1.0, 1.0)


def _words(
    levels_OI: Tensor, kind: Kind, dtype: torch.dtype, num_outputs: int, num_inputs: int, chunk: int, num_chunks: int
) -> Tensor:
    """Return the codes of padded outputs and inputs in the order of the kernel."""
    codes = torch.zeros(num_outputs, num_inputs, dtype=torch.uint8, device=levels_OI.device)
    codes[: levels_OI.shape[0], : levels_OI.shape[1]] = levels_OI
    codes = codes.view(num_outputs // TILE_OUTPUTS, TILE_OUTPUTS, -1, num_chunks, chunk)
    if kind in ("s8", "f8"):
        words = codes.permute(0, 2, 3, 1, 4).squeeze(2).contiguous()
        return (words ^ 0x80).view(torch.int8) if kind == "s8" else words.view(torch.float8_e4m3fn)
    chunks = codes.permute(3, 0, 2, 1, 4).unbind(0)
    if num_chunks == 2:
        return torch.stack(chunks, dim=-1).view(torch.int16).squeeze(-1)
    pairs = torch.zeros(*chunks[0].shape[:-1], chunk // 2, dtype=torch.int32, device=codes.device)
    for codes_of_chunk, pieces in zip(chunks, _PIECES[kind, dtype], strict=True):
        for half in range(2):
            places = _places(pieces)
            for rotation, mask in pieces:
                bits = torch.zeros_like(pairs)
                for bit, place in enumerate(places):
                    if mask >> place & 1:
                        bits |= (codes_of_chunk[..., half::2].int() >> bit & 1) << place + 16 * half
                pairs |= _rotated_right(bits, rotation)
    return pairs.view(torch.int16)


def _places(pieces: tuple[Piece, ...]) -> list[int]:
    """Return the bits of a number that are those of its code, ascending."""
    return [place for place in range(16) if any(mask >> place & 1 for _, mask in pieces)]


def _rotated_right(words: Tensor, count: int) -> Tensor:
    """Rotate words of int32."""
    return words if not count else (words >> count) & (_FULL >> count) | words << 32 - count


def _scales(
    weight: QuantizedWeight, kind: Kind, dtype: torch.dtype, group_size: int, device: torch.device
) -> tuple[Tensor, torch.dtype, Other] | None:
    """Return the words of scales by group and output, the type of scales and what is beside them; None: no type
    holds a scale or a minimum."""
    scale_GO = weight.scale_OG.to(device).T
    minimum_GO = None if weight.minimum_OG is None else weight.minimum_OG.to(device).T
    unit, sum_unit = units_of(kind, dtype, group_size)
    # A word with the scales of two blocks would cost more instructions than bytes.
    has_shifts = weight.zero_OG is not None or (kind in ("u4", "u8") and group_size >= _GROUP_OF_OUTPUTS)
    other: Other = "shift" if has_shifts else "none"
    if minimum_GO is not None or (has_shifts and (kind, dtype) == ("u4", torch.bfloat16)):
        other = "minimum"
    if not group_size:
        return _float_words(scale_GO), torch.float32, other
    if kind == "f8" or (kind == "e4m3" and weight.scale_OG.dtype == torch.float32):
        is_fitting = bool((scale_GO.float().abs() < 2.0**7).all())
        return (_float_words(scale_GO), torch.float32, other) if is_fitting else None
    own = [scale_GO] if minimum_GO is None else [scale_GO, minimum_GO]
    scale_dtype = dtype if kind in ("u4", "e2m1") else _exact_type(*own)
    if scale_dtype is None:
        return None
    halves_GO = (scale_GO.to(scale_dtype).float() * unit).to(scale_dtype)
    if not bool(halves_GO.isfinite().all()):
        return None
    if other == "none":
        if len(halves_GO) % 2:
            halves_GO = torch.cat([halves_GO, torch.zeros_like(halves_GO[:1])])
        return _pairs(halves_GO[::2], halves_GO[1::2]), scale_dtype, other
    if minimum_GO is not None:
        minimum_GO = (minimum_GO.float() / sum_unit).to(scale_dtype)
        return (_pairs(halves_GO, minimum_GO), scale_dtype, other) if bool(minimum_GO.isfinite().all()) else None
    zero_GO = torch.full_like(halves_GO, weight.offset) if weight.zero_OG is None else weight.zero_OG.to(device).T
    if other == "minimum":
        # Exact for a power of 2, as symmetric formats have it; other zeros are rounded as scales are.
        minimum_GO = -zero_GO.float() * halves_GO.float() / unit / sum_unit
        return _pairs(halves_GO, minimum_GO.to(scale_dtype)), scale_dtype, other
    base = 0 if kind == "u8" else torch.tensor(BASES[kind, dtype], dtype=torch.int16).view(dtype).item()
    return _pairs(halves_GO, (zero_GO.float() + base).to(scale_dtype)), scale_dtype, other


def _exact_type(*values: Tensor) -> torch.dtype | None:
    """Return the type of 16 bits that holds scales and minimums; None: none does.

    It is their own. Those of float32 become float16, if that rounds none by more than 2^-11, or bfloat16 if that is
    exact.
    """
    dtype = values[0].dtype
    if dtype != torch.float32:
        return dtype
    if all(fits_float16(own) for own in values):
        return torch.float16
    return torch.bfloat16 if all(torch.equal(own.bfloat16().float(), own) for own in values) else None


def _float_words(values_GO: Tensor) -> Tensor:
    return values_GO.float().contiguous().view(torch.int32)


def _pairs(lower: Tensor, upper: Tensor) -> Tensor:
    return torch.stack([lower, upper], dim=-1).contiguous().view(torch.int32).squeeze(-1)


def assembly(kind: Kind, dtype: torch.dtype, group_size: int) -> tuple[str, ...] | None:
    """Return instructions that make the bits of a chunk's numbers from words, two words at once; one for each chunk.

    PTX has no shift of two halves, and the compiler would make seven instructions where these are one to three.
    """
    if pieces_of(kind, dtype, group_size):
        return tuple(
            _pieces_assembly(pieces, BASES.get((kind, dtype), 0)) for pieces in pieces_of(kind, dtype, group_size)
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


def _pieces_assembly(pieces: tuple[Piece, ...], base: int) -> str:
    """Return the instructions for the codes of a chunk."""
    lines = [".reg .b32 t, bits;"]
    for index, (rotation, mask) in enumerate(pieces):
        word = "$1"
        if rotation:
            lines.append(f"shf.l.wrap.b32 t, $1, $1, {rotation};")
            word = "t"
        others = "bits" if index else base * 0x10001
        target = "$0" if index == len(pieces) - 1 else "bits"
        lines.append(f"lop3.b32 {target}, {word}, {mask * 0x10001:#x}, {others}, 0xea;")
    return f"{{ {' '.join(lines)} }}"
