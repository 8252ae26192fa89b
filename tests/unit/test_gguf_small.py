"""GGUF's IQ types, ternary types, Q2_K and Q3_K: integers and scales mean what the gguf package decodes."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from octavo.worker_proc.weights.gguf_blocks import GgufMatrix
from octavo.worker_proc.weights.gguf_small import SMALL_TYPES

EXACT = (Type.IQ4_NL, Type.TQ1_0, Type.TQ2_0)
"""Whose scales are the float16 numbers of the file."""
FOUR_BITS = (Type.Q2_K, Type.Q3_K, Type.TQ1_0, Type.TQ2_0)
STARTS = {Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.TQ1_0: (52,), Type.TQ2_0: (64,)}
"""Where the float16 numbers of a block are; those of the others are at its beginning."""


def random_rows(kind: Type) -> np.ndarray:
    """Return the bytes of 5 rows of 1024 numbers, with float16 numbers near 0.01 and all other bits random."""
    num_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    noise = np.random.default_rng(1)
    blocks = noise.integers(0, 256, (5, 1024 // num_values, block_bytes), dtype=np.uint8)
    if kind is Type.IQ1_M:  # four bits in each of the last four words
        words = blocks[..., 48:].copy().view(np.uint16) & 0x0FFF
        for place, bits in enumerate((0x1, 0x2, 0x1, 0x2)):  # 0x2121, about 0.01
            words[..., place] |= bits << 12
        blocks[..., 48:] = words.view(np.uint8)
        return blocks.reshape(5, -1)
    for start in STARTS.get(kind, (0,)):
        numbers = noise.uniform(0.005, 0.02, blocks.shape[:2]).astype(np.float16)
        blocks[..., start : start + 2] = numbers[..., None].view(np.uint8)
    if kind is Type.TQ1_0:  # five digits of base 3 as written by ggml
        digits = noise.integers(0, 243, (*blocks.shape[:2], 52))
        blocks[..., :52] = (digits * 256 + 242) // 243
    if kind is Type.TQ2_0:
        crumbs = noise.integers(0, 3, (4, *blocks.shape[:2], 64), dtype=np.uint8)
        blocks[..., :64] = crumbs[0] | crumbs[1] << 2 | crumbs[2] << 4 | crumbs[3] << 6
    return blocks.reshape(5, -1)


@pytest.mark.parametrize("kind", SMALL_TYPES)
def test_integers_and_scales_mean_what_the_blocks_mean(kind: Type) -> None:
    matrix = GgufMatrix("some", kind, random_rows(kind))
    expected = torch.from_numpy(gguf.quants.dequantize(matrix.rows_OB, kind))
    assert matrix.shape == (5, 1024)
    assert torch.equal(matrix.dequantized(), expected)
    weight = matrix.quantized()
    assert weight.bits == (4 if kind in FOUR_BITS else 8)
    if kind in EXACT:
        assert torch.equal(weight.dequantize(), expected)
    size = expected.abs()
    if weight.minimum_OG is not None:  # a difference of two rounded numbers
        size = size + 2 * weight.minimum_OG.float().abs().repeat_interleave(weight.group_size, 1)
    assert ((weight.dequantize() - expected).abs() <= size * 2**-10 + 1e-9).all()
    used = weight.levels_OI.unique()
    assert used.numel() > 2
    assert (weight.used_levels is None) == (kind in FOUR_BITS)
    assert weight.used_levels is None or set(used.tolist()) <= set(weight.used_levels)
