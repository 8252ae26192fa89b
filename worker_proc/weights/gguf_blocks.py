"""Decodes GGUF's quantized types: from the blocks of a tensor to levels, scales and minimums, or to float32.

Reads no files and does not know a tensor's place in a model. The layouts are ggml's structs (ggml-common.h); a block
holds 32 values, a K-quant's 256 in groups of 32 or 16:

    type   block                                                          value (q: the level as stored)
    Q4_0   d, 16 bytes of two levels                                      d * (q - 8)
    Q4_1   d, m, 16 bytes of two levels                                   d * q + m
    Q5_0   d, 32 fifth bits, 16 bytes of two low halves                   d * (q - 16)
    Q5_1   d, m, 32 fifth bits, 16 bytes of two low halves                d * q + m
    Q8_0   d, 32 signed bytes                                             d * q
    Q4_K   d, m, 8 x (6-bit s, 6-bit t), 128 bytes of two levels          d * s * q - m * t
    Q5_K   d, m, 8 x (6-bit s, 6-bit t), 256 fifth bits, as Q4_K          d * s * q - m * t
    Q6_K   128 bytes of two low halves, 256 x 2 high bits, 16 signed s, d d * s * (q - 32)
    MXFP4  e, 16 bytes of two numbers (e2m1)                              2 ** (e - 127) * number

`gguf_small.py` has the types with fewer bits.

`d` and `m` are float16. Where they are the scales, these are exact in float16. Products are rounded to nearest, with a
relative error of at most 2**-11. Products below 2**-14, float16's smallest normal number, are exact if they are
multiples of 2**-24, as those of `d` or `m` and an integer are. Scales of IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S and
IQ3_XXS have quarters or eighths of `d`: below 2**-14 their error is at most 2**-25, which is more in proportion.

If a product or a power of two is too large or too small for float16, the scales of its tensor are float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize
from torch import Tensor

from octavo.kernels.linear.quantized import QuantizedWeight
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.parallel.sharding import Shard
from octavo.worker_proc.weights.gguf_parts import Bytes, Floats, Parts, halves, nibbles
from octavo.worker_proc.weights.gguf_small import SMALL_TYPES

_VALUES_PER_ROW = 2**14
"""A power of two, and a multiple of every type's block."""


@dataclass(frozen=True, slots=True, eq=False)
class GgufMatrix:
    """A quantized matrix in its stored form."""

    name: str
    """Name in the file, for error messages."""
    kind: Type
    rows_OB: Bytes
    """Bytes of each row's blocks."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        values_per_block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return self.rows_OB.shape[0], self.rows_OB.shape[1] // block_bytes * values_per_block

    def dequantized(self) -> Tensor:
        """Return the float32 values."""
        return dequantized(self.rows_OB.reshape(-1), self.kind).view(self.shape)

    def quantized(self) -> QuantizedWeight:
        """Return levels and scales of the same values: exact, or rounded as the module's docstring says.

        Raises:
            ConfigError: a scale or a minimum is not finite.
        """
        values_per_block, block_bytes = GGML_QUANT_SIZES[self.kind]
        parts = _TAKE_APART[self.kind](self.rows_OB.reshape(-1, block_bytes))
        own = (parts.scales,) if parts.minimums is None else (parts.scales, parts.minimums)
        if not all(np.isfinite(values).all() for values in own):
            raise ConfigError(
                f"tensor {self.name} has scales that are not finite numbers",
                hint="the file is damaged: download or convert it again",
            )
        dtype = np.float16 if all(_is_in_float16_range(values) for values in own) else np.float32
        scale_OG, *minimum_OG = (
            torch.from_numpy(values.astype(dtype, copy=False).reshape(self.shape[0], -1)) for values in own
        )
        return QuantizedWeight(
            levels_OI=torch.from_numpy(parts.levels.reshape(self.shape)),
            scale_OG=scale_OG,
            minimum_OG=minimum_OG[0] if minimum_OG else None,
            offset=parts.offset,
            bits=parts.bits,
            group_size=values_per_block // parts.scales.shape[1],
            used_levels=parts.used_levels,
        )

    def part(self, shard: Shard) -> "GgufMatrix":
        """Return the part that a rank holds.

        Raises:
            ConfigError: the shard begins or ends within a block.
        """
        if shard.dim == 0:
            return replace(
                self, rows_OB=np.concatenate([self.rows_OB[part.start : part.stop] for part in shard.ranges])
            )
        values_per_block, block_bytes = GGML_QUANT_SIZES[self.kind]
        (columns,) = shard.ranges
        if columns.start % values_per_block or columns.stop % values_per_block:
            raise ConfigError(
                f"tensor {self.name} has {shard.size} inputs in blocks of {values_per_block} ({self.kind.name}), which "
                "cannot be divided evenly between the ranks",
                hint="use a smaller --tensor-parallel-size, or a file with smaller blocks such as Q8_0 or Q4_0",
            )
        first, last = (column // values_per_block * block_bytes for column in (columns.start, columns.stop))
        return replace(self, rows_OB=self.rows_OB[:, first:last])


def dequantized(data: Bytes, kind: Type) -> Tensor:
    """Return the float32 values of quantized blocks. Both arrays are one-dimensional."""
    values_per_block, block_bytes = GGML_QUANT_SIZES[kind]
    num_blocks = data.size // block_bytes
    # perf: the gguf package decodes 16 rows at a time, and the rows of a weight are so short that the overhead of
    # numpy calls dominates. Blocks are independent of rows, so they are regrouped into longer rows: 0.36 s instead
    # of 0.63 s for a model of 135 million weights.
    blocks_per_row = min(num_blocks & -num_blocks, _VALUES_PER_ROW // values_per_block)
    return torch.from_numpy(dequantize(data.reshape(-1, blocks_per_row * block_bytes), kind)).view(-1)


def _is_in_float16_range(values: Floats) -> bool:
    """Whether none of the values becomes infinite or zero in float16."""
    with np.errstate(over="ignore", under="ignore"):
        narrow = values.astype(np.float16)
    return bool(np.isfinite(narrow).all()) and np.array_equal(narrow == 0, values == 0)


def _unpack_q4_0(blocks: Bytes) -> Parts:
    return Parts(nibbles(blocks[:, 2:]), halves(blocks, 0), offset=8)


def _unpack_q4_1(blocks: Bytes) -> Parts:
    return Parts(nibbles(blocks[:, 4:]), halves(blocks, 0), halves(blocks, 2))


# Levels of symmetric types with more than 4 bits are offset to 128, so that the parts of a layer may be of different
# types.


def _unpack_q5_0(blocks: Bytes) -> Parts:
    levels = _five_bits(blocks[:, 2:6], blocks[:, 6:])
    levels += 128 - 16
    return Parts(levels, halves(blocks, 0), bits=8, offset=128)


def _unpack_q5_1(blocks: Bytes) -> Parts:
    return Parts(_five_bits(blocks[:, 4:8], blocks[:, 8:]), halves(blocks, 0), halves(blocks, 2), bits=8)


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    """Return 32 levels per block, from 4 bytes of fifth bits and 16 bytes of lower bits."""
    levels = nibbles(low).reshape(-1, 32)
    levels |= np.unpackbits(high, axis=1, bitorder="little") << 4
    return levels


def _unpack_q8_0(blocks: Bytes) -> Parts:
    # Flipping the sign bit of a two's complement number adds 128.
    return Parts(blocks[:, 2:] ^ np.uint8(128), halves(blocks, 0), bits=8, offset=128)


def _unpack_q4_k(blocks: Bytes) -> Parts:
    scales, minimums = _k_scales(blocks)
    return Parts(nibbles(blocks[:, 16:].reshape(-1, 4, 32)), scales, minimums)


def _unpack_q5_k(blocks: Bytes) -> Parts:
    scales, minimums = _k_scales(blocks)
    levels = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth_bits = blocks[:, 16:48]
    for group in range(8):
        levels[:, group] |= (fifth_bits >> group & 1) << 4
    return Parts(levels, scales, minimums, bits=8)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Return the 8 scales and minimums of each block of Q4_K or Q5_K, from two float16 and 12 bytes.

    The bytes, as bits of the 8 scales A..H and minimums a..h, most significant first:

        0-3   EEAAAAAA FFBBBBBB GGCCCCCC HHDDDDDD      the upper two bits of the last four
        4-7   eeaaaaaa ffbbbbbb ggcccccc hhdddddd
        8-11  eeeeEEEE ffffFFFF ggggGGGG hhhhHHHH      their lower four
    """
    both = halves(blocks, 0, 2).astype(np.float32)
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, first >> 6 << 4 | third & 15], axis=1)
    minimums = np.concatenate([second & 63, second >> 6 << 4 | third >> 4], axis=1)
    return both[:, :1] * scales, -both[:, 1:] * minimums


def _unpack_q6_k(blocks: Bytes) -> Parts:
    # Each half of a block: 64 bytes with the lower 4 bits of its quarters 0 | 2 and 1 | 3, 32 with all upper ones.
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    for quarter in range(4):
        low[:, :, quarter] |= (high >> 2 * quarter & 3) << 4
    low += 128 - 32
    scales = halves(blocks, 208).astype(np.float32) * blocks[:, 192:208].view(np.int8)
    return Parts(low, scales, bits=8, offset=128)


def _unpack_mxfp4(blocks: Bytes) -> Parts:
    levels = _MXFP4_LEVELS[nibbles(blocks[:, 1:])]
    scales = np.ldexp(np.float32(1.0), blocks[:, :1].astype(np.int32) - 128)  # of halves
    # ggml gives a block of zeros the exponent 0, for which all scales of the tensor would have to be float32.
    scales[(levels == _MXFP4_OFFSET).all(axis=(1, 2))] = 0.0
    used = tuple(np.unique(_MXFP4_LEVELS).tolist())
    return Parts(levels, scales, bits=8, offset=_MXFP4_OFFSET, used_levels=used)


_MXFP4_OFFSET = 12
_MXFP4_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8).astype(
    np.uint8
) + np.uint8(_MXFP4_OFFSET)
"""Twice the value of each number, plus 12."""

_TAKE_APART: Mapping[Type, Callable[[Bytes], Parts]] = {
    Type.Q4_0: _unpack_q4_0,
    Type.Q4_1: _unpack_q4_1,
    Type.Q5_0: _unpack_q5_0,
    Type.Q5_1: _unpack_q5_1,
    Type.Q8_0: _unpack_q8_0,
    Type.Q4_K: _unpack_q4_k,
    Type.Q5_K: _unpack_q5_k,
    Type.Q6_K: _unpack_q6_k,
    Type.MXFP4: _unpack_mxfp4,
    **SMALL_TYPES,
}
SUPPORTED_TYPES = frozenset(_TAKE_APART)
"""Quantized types that can be read."""
