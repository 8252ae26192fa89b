"""Decodes GGUF's types with at most four bits and tables of numbers: the IQ types, ternary ones, Q2_K and Q3_K.

Each value is a scale times a small integer, also where the integer comes from a table of eight numbers (IQ1 to IQ3):
the gguf package decodes those, and a division by the scale gives the integers back exactly.

    type            group  scale                    integers
    Q2_K            16     d * s                    0 to 3, and a minimum m * t
    Q3_K            16     d * (s - 32)             -4 to 3
    IQ4_NL          32     d                        a table of 16, -127 to 113
    IQ4_XS          32     d * (s - 32)             the same
    IQ3_XXS IQ3_S   32     d * (s + 1/2) / 2, or d * (2 * s + 1)   a table, and signs
    IQ2_XXS         32     d * (s + 1/2) / 4        a table, and signs
    IQ2_XS IQ2_S    16     the same                 the same
    IQ1_S IQ1_M     32, 16  d * (2 * s + 1) / 8     8 times -1, 0 or 1, plus or minus 1
    TQ1_0 TQ2_0     256    d                        -1, 0 or 1
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, IQ4_NL, dequantize

from octavo.worker_proc.weights.gguf_parts import Bytes, Floats, Parts, halves, nibbles

_IQ4_LEVELS = (np.array(IQ4_NL.kvalues, np.int16) + 128).astype(np.uint8)
_USED_IQ4_LEVELS = tuple(_IQ4_LEVELS.tolist())
_IQ1_MAGNITUDES = (1, 7, 9)


def _unpack_q2_k(blocks: Bytes) -> Parts:
    both = halves(blocks, 80, 2).astype(np.float32)
    scales = blocks[:, :16]
    levels = np.stack([blocks[:, 16:80].reshape(-1, 2, 32) >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
    return Parts(levels, both[:, :1] * (scales & 15), -both[:, 1:] * (scales >> 4))


def _unpack_q3_k(blocks: Bytes) -> Parts:
    low = np.stack([blocks[:, 32:96].reshape(-1, 2, 32) >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
    high = np.stack([blocks[:, :32] >> bit & 1 for bit in range(8)], axis=1).reshape(-1, 2, 4, 32)
    lower, upper = nibbles(blocks[:, 96:104]).reshape(-1, 16), blocks[:, 104:108]
    upper = np.concatenate([upper >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales = (lower | upper << 4).astype(np.float32) - 32
    return Parts(low | high << 2, halves(blocks, 108).astype(np.float32) * scales, offset=4)


def _unpack_iq4_nl(blocks: Bytes) -> Parts:
    levels = _IQ4_LEVELS[nibbles(blocks[:, 2:])]
    return Parts(levels, halves(blocks, 0), bits=8, offset=128, used_levels=_USED_IQ4_LEVELS)


def _unpack_iq4_xs(blocks: Bytes) -> Parts:
    levels = _IQ4_LEVELS[nibbles(blocks[:, 8:].reshape(-1, 8, 16))]
    upper = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16)
    upper = np.concatenate([upper >> 2 * group & 3 for group in range(8)], axis=1)
    scales = (_scales_of_nibbles(blocks, 4, 4) + 16 * upper).astype(np.float32) - 32
    scales *= halves(blocks, 0)
    return Parts(levels, scales, bits=8, offset=128, used_levels=_USED_IQ4_LEVELS)


def _scales_of_nibbles(blocks: Bytes, start: int, count: int) -> Bytes:
    """Return the two 4-bit numbers of each byte, the low one first."""
    packed = blocks[:, start : start + count]
    return np.stack([packed & 15, packed >> 4], axis=2).reshape(len(blocks), -1)


def _words(blocks: Bytes, start: int, count: int, kind: type[np.unsignedinteger]) -> np.ndarray:
    size = np.dtype(kind).itemsize
    return np.ascontiguousarray(blocks[:, start : start + count * size]).view(kind)


def _iq2_xxs_scales(blocks: Bytes) -> Floats:
    return _of_scale(blocks, _words(blocks, 2, 16, np.uint32)[:, 1::2] >> 28, 0.25)


def _iq2_scales(blocks: Bytes) -> Floats:
    """Return the scales of IQ2_XS and IQ2_S, which are the last 8 bytes of a block."""
    return _of_scale(blocks, _scales_of_nibbles(blocks, blocks.shape[1] - 8, 8), 0.25)


def _iq3_xxs_scales(blocks: Bytes) -> Floats:
    return _of_scale(blocks, _words(blocks, 66, 8, np.uint32) >> 28, 0.5)


def _iq3_s_scales(blocks: Bytes) -> Floats:
    return _of_scale(blocks, _scales_of_nibbles(blocks, 106, 4), 2.0)


def _of_scale(blocks: Bytes, scales: np.ndarray, factor: float) -> Floats:
    return halves(blocks, 0).astype(np.float32) * ((scales.astype(np.float32) + np.float32(0.5)) * np.float32(factor))


def _iq1_s_scales(blocks: Bytes) -> Floats:
    return _of_scale(blocks, _words(blocks, 34, 8, np.uint16) >> 12 & 7, 0.25)


def _iq1_m_scales(blocks: Bytes) -> Floats:
    words = _words(blocks, 48, 4, np.uint16)
    bits = words[:, 0] >> 12 | words[:, 1] >> 8 & 0xF0 | words[:, 2] >> 4 & 0xF00 | words[:, 3] & 0xF000
    scales = np.stack([words >> shift & 7 for shift in (0, 3, 6, 9)], axis=2).reshape(len(blocks), -1)
    d = bits.astype(np.uint16).view(np.float16).astype(np.float32)[:, None]
    factors: npt.NDArray[np.float32] = (scales.astype(np.float32) * 2 + 1) / np.float32(8)
    return (d * factors).astype(np.float32)


def _ternary_scales(blocks: Bytes) -> Floats:
    return halves(blocks, blocks.shape[1] - 2).astype(np.float32)


def _divided(
    kind: Type,
    scales_of: Callable[[Bytes], Floats],
    magnitudes: tuple[int, ...] | None = None,
    *,
    bits: int = 8,
    offset: int = 128,
) -> Callable[[Bytes], Parts]:
    """Return a function that splits blocks whose integers are decoded by the gguf package.

    Args:
        kind: kind of the blocks.
        scales_of: returns the scales of blocks.
        magnitudes: allowed magnitudes of the signed integers; `None` means all that fit `bits`.
        bits: number of bits of a level.
        offset: level that means 0.
    """
    used = (
        None if magnitudes is None else tuple(sorted(offset + sign * size for size in magnitudes for sign in (-1, 1)))
    )

    def unpack(blocks: Bytes) -> Parts:
        scales = scales_of(blocks)
        values = dequantize(blocks, kind).reshape(*scales.shape, -1)
        levels = np.rint(values / np.where(scales == 0, 1, scales)[..., None]) + offset
        return Parts(levels.astype(np.uint8), scales, bits=bits, offset=offset, used_levels=used)

    return unpack


SMALL_TYPES: Mapping[Type, Callable[[Bytes], Parts]] = {
    Type.Q2_K: _unpack_q2_k,
    Type.Q3_K: _unpack_q3_k,
    Type.IQ4_NL: _unpack_iq4_nl,
    Type.IQ4_XS: _unpack_iq4_xs,
    Type.IQ3_XXS: _divided(Type.IQ3_XXS, _iq3_xxs_scales, IQ3_XXS.grid_map),
    Type.IQ3_S: _divided(Type.IQ3_S, _iq3_s_scales, IQ3_S.grid_map),
    Type.IQ2_XXS: _divided(Type.IQ2_XXS, _iq2_xxs_scales, IQ2_XXS.grid_map),
    Type.IQ2_XS: _divided(Type.IQ2_XS, _iq2_scales, IQ2_XS.grid_map),
    Type.IQ2_S: _divided(Type.IQ2_S, _iq2_scales, IQ2_S.grid_map),
    Type.IQ1_S: _divided(Type.IQ1_S, _iq1_s_scales, _IQ1_MAGNITUDES),
    Type.IQ1_M: _divided(Type.IQ1_M, _iq1_m_scales, _IQ1_MAGNITUDES),
    Type.TQ1_0: _divided(Type.TQ1_0, _ternary_scales, bits=4, offset=1),
    Type.TQ2_0: _divided(Type.TQ2_0, _ternary_scales, bits=4, offset=1),
}
"""Decoder of each type's blocks."""
