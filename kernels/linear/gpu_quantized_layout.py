"""The layout of quantized weights for the kernel of `gpu_quantized_kernels`, made once at load. Multiplies nothing.

A weight is divided into tiles of 128 outputs and blocks of inputs. The data that a program reads at once is contiguous,
so the kernel needs neither descriptors nor masks. A block consists of one or more chunks of inputs. A 16-bit word holds
four 4-bit codes or two 8-bit codes, one of each chunk: the j-th codes of all words are chunk j. So a few instructions
extract the codes of a chunk from two words at once. Numbers that are multiplied without conversion (`s8`, `f8`) are
stored as bytes, one chunk per block.

A 4-bit code is stored such that rotating the word and masking it leaves the bits of the code where the 16-bit number
has them. If the exponent field of a bfloat16 is 0 or 1, its lowest 8 bits count units of 2^-133. So an integer code is
the bit pattern of a tiny number, and one `fma` with a large scale turns it into the weight. Weights are kept 2^16 times
too small so that these scales fit bfloat16, and the sums are multiplied by 2^16 at the end. Both steps are exact.

The scales of a tile are ordered by group, then by output. They are stored in 32-bit words, the smallest unit that can
be copied while the previous tile is multiplied. A word is a float32 scale; or a 16-bit scale with the zero or minimum
of its group; or the 16-bit scales of two adjacent groups. If a block needs several words per output, two adjacent words
are read at once.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from octavo.kernels.linear.quantized import GROUP_MULTIPLE, QuantizedWeight, fits_float16
from octavo.kernels.quantize.scaling import Scaling

TILE_OUTPUTS = 128
"""Outputs of a tile, both in memory and in a program."""

Kind = Literal["u4", "e2m1", "u8", "e4m3", "s8", "f8"]
"""Kinds of codes. `s8` and `f8` are 8-bit numbers that are multiplied by rows of the same type. All others are codes of
4 or 8 bits that are converted to the dtype of the rows."""
Other = Literal["none", "shift", "minimum"]
"""The second parameter of a group, in addition to its scale. A `shift` is subtracted from the levels of the group."""

ROW_TYPES = (torch.bfloat16, torch.float16)
_CHUNK = 32
_CHUNK_OF_PRODUCTS = 128
"""Inputs of a chunk of `s8` or `f8`: 128 bytes."""
_GROUP_OF_OUTPUTS = 128
"""Group size of weights with one scale and one zero or minimum per output: only groups can have zeros and minimums."""
BASES = {("u4", torch.float16): 0x6400}
"""Bits of each number in addition to those of its code. 0x6400 is 1024, whose last place is 1."""
_UNITS = {
    ("u4", torch.bfloat16): (2.0**117, 2.0**16),
    ("u8", torch.bfloat16): (2.0**117, 2.0**16),
    ("e2m1", torch.bfloat16): (2.0**110, 2.0**16),
    ("e2m1", torch.float16): (2.0**14, 1.0),
}
"""Factors of the scales and of the sums. They compensate for codes that are read as tiny numbers."""

Piece = tuple[int, int]
"""Left rotation of two adjacent words, taken as one 32-bit word, and the mask of the code's bits in each of the two."""
_U4, _FULL = 0x000F, 0xFFFFFFFF
_PIECES: dict[tuple[Kind, torch.dtype], tuple[tuple[Piece, ...], ...]] = {
    ("u4", torch.bfloat16): (((0, _U4),), ((0, _U4 << 4),), ((24, _U4),), ((24, _U4 << 4),)),
    ("u4", torch.float16): (((0, _U4),), ((28, _U4),), ((24, _U4),), ((20, _U4),)),
    # The bits are sign, exponent and the upper bit of the fraction. No order of the bits needs fewer instructions.
    ("e2m1", torch.bfloat16): (((0, 0x81C0),), ((26, 0x81C0),), ((22, 0x81C0),), ((28, 0x80C0), (20, 0x0100))),
    ("e2m1", torch.float16): (
        ((0, 0x8E00),),
        ((19, 0x8E00),),
        ((26, 0x8C00), (23, 0x0200)),
        ((28, 0x8600), (23, 0x0800)),
    ),
    ("u8", torch.bfloat16): (((0, 0x00FF),), ((24, 0x00FF),)),  # if scales multiply the sums, not the numbers
}
"""Pieces of each chunk. The bits of a code, in ascending order, go to the bits of all masks of its chunk."""


@dataclass(frozen=True, slots=True, eq=False)
class GpuQuantizedWeight:
    """A packed weight."""

    kind: Kind
    num_outputs: int
    num_inputs: int
    dtype: torch.dtype
    """dtype of the rows: bfloat16 or float16."""
    words: Tensor
    """int16, int8 or float8_e4m3fn; shape (tiles, blocks, 128, chunk)."""
    scales: Tensor
    """int32 words; shape (tiles, words, 128, 1), or (tiles, pairs of words, 128, 2) if a block has several words."""
    scale_dtype: torch.dtype
    group_size: int
    """Inputs that share a scale; 0: each output has one float32 scale."""
    other: Other
    zero: int
    """Level that represents 0, unless groups have shifts."""
    unit: float
    """Factor of the scales. The scales of groups already contain it; the kernel applies it to those of outputs."""
    sum_unit: float
    """Factor that the kernel applies to the sums."""
    chunk: int
    """Inputs of a chunk."""
    num_chunks: int
    """Chunks of a block."""
    order_I: Tensor | None
    """int32; the input that each column multiplies. `None` if the columns are in order."""
    row_scale: float | None
    """For `s8` and `f8`: the static scale of all rows; `None` if each row has its own scale."""
    row_scaling: Scaling
    """Scaling of the rows for `s8`."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks of inputs."""
        return self.words.shape[1]

    @property
    def num_bytes(self) -> int:
        """Size of the packed weight in bytes."""
        tensors = (self.words, self.scales) if self.order_I is None else (self.words, self.scales, self.order_I)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def pack(
    weight: QuantizedWeight, dtype: torch.dtype, device: torch.device, *, has_float8: bool
) -> GpuQuantizedWeight | None:
    """Return the packed form on a device; `None` if no kernel multiplies with this format, so it must be dequantized.

    Args:
        weight: weight on any device.
        dtype: dtype of the rows.
        device: device of the packed form.
        has_float8: whether the GPU multiplies matrices of float8_e4m3fn. If not, such weights are converted to the
            dtype of the rows, and rows are not quantized.
    """
    if not weight.is_per_channel:
        # A power of 2, so that groups begin at the same chunks in every block.
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
    """Return the number of inputs of a chunk, which all belong to one group, and the number of chunks of a block."""
    if kind in ("s8", "f8"):
        return _CHUNK_OF_PRODUCTS, 1
    return (_CHUNK if group_size % _CHUNK == 0 else GROUP_MULTIPLE), (4 if kind in ("u4", "e2m1") else 2)


def pieces_of(kind: Kind, dtype: torch.dtype, group_size: int) -> tuple[tuple[Piece, ...], ...]:
    """Return the pieces of each chunk. Empty if numbers are not made from pieces: 8-bit codes are converted through
    float32, and `s8` and `f8` not at all."""
    return () if kind == "u8" and group_size else _PIECES.get((kind, dtype), ())


def units_of(kind: Kind, dtype: torch.dtype, group_size: int) -> tuple[float, float]:
    """Return the factors of the scales and of the sums."""
    return _UNITS.get((kind, dtype), (1.0, 1.0)) if pieces_of(kind, dtype, group_size) else (1.0, 1.0)


def _words(
    levels_OI: Tensor, kind: Kind, dtype: torch.dtype, num_outputs: int, num_inputs: int, chunk: int, num_chunks: int
) -> Tensor:
    """Return the codes in the order of the kernel, with padded outputs and inputs."""
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
    """Return the bit positions of a code in its number, ascending."""
    return [place for place in range(16) if any(mask >> place & 1 for _, mask in pieces)]


def _rotated_right(words: Tensor, count: int) -> Tensor:
    """Rotate int32 words to the right."""
    return words if not count else (words >> count) & (_FULL >> count) | words << 32 - count


def _scales(
    weight: QuantizedWeight, kind: Kind, dtype: torch.dtype, group_size: int, device: torch.device
) -> tuple[Tensor, torch.dtype, Other] | None:
    """Return the words of scales by group and output, their dtype, and the second parameter of the groups; `None` if no
    dtype holds all scales and minimums."""
    scale_GO = weight.scale_OG.to(device).T
    minimum_GO = None if weight.minimum_OG is None else weight.minimum_OG.to(device).T
    unit, sum_unit = units_of(kind, dtype, group_size)
    # Groups of a block or more get a shift with each scale: sharing a word between two blocks would save bytes, but
    # cost more in instructions.
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
        # Exact if the zero is a power of 2, as in symmetric formats. Other zeros are rounded like scales.
        minimum_GO = -zero_GO.float() * halves_GO.float() / unit / sum_unit
        return _pairs(halves_GO, minimum_GO.to(scale_dtype)), scale_dtype, other
    base = 0 if kind == "u8" else torch.tensor(BASES[kind, dtype], dtype=torch.int16).view(dtype).item()
    return _pairs(halves_GO, (zero_GO.float() + base).to(scale_dtype)), scale_dtype, other


def _exact_type(*values: Tensor) -> torch.dtype | None:
    """Return a 16-bit dtype that holds the scales and minimums; `None` if there is none.

    16-bit values keep their dtype. float32 values become float16 if none is rounded by more than 2^-11, or else
    bfloat16 if that is exact.
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
    """Return the PTX that makes the bits of a chunk's numbers from two words at once, one string per chunk; `None` if
    numbers are multiplied without conversion.

    PTX cannot shift two 16-bit halves at once. The compiler would emit seven instructions where these are a few.
    """
    if pieces_of(kind, dtype, group_size):
        return tuple(
            _pieces_assembly(pieces, BASES.get((kind, dtype), 0)) for pieces in pieces_of(kind, dtype, group_size)
        )
    if kind == "u8":  # the bytes of 2^23 in float32, with the code as the lowest byte
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
    """Return the PTX for the codes of one chunk."""
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
