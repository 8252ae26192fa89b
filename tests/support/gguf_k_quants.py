"""Writes ggml's K-quants, which the gguf package only reads; scales are simpler and less accurate than llama.cpp's."""

import numpy as np
from gguf import GGMLQuantizationType as Type

VALUES = 256
"""Number of values of a block."""


def quantize_k(values: np.ndarray, kind: Type) -> np.ndarray:
    """Return the bytes of the rows of a matrix whose columns are a multiple of 256."""
    blocks = values.astype(np.float32).reshape(-1, VALUES)
    encoded = _q6_k(blocks) if kind is Type.Q6_K else _q4_or_q5_k(blocks, 4 if kind is Type.Q4_K else 5)
    return encoded.reshape(len(values), -1)


def _q4_or_q5_k(blocks: np.ndarray, bits: int) -> np.ndarray:
    groups = blocks.reshape(-1, 8, 32)
    lowest = np.minimum(groups.min(axis=2), 0)
    steps = (groups.max(axis=2) - lowest) / (2**bits - 1)
    d, scales = _coarse(steps)
    d_min, minimums = _coarse(-lowest)
    wide = (d.astype(np.float32) * scales)[..., None]
    levels = (groups + (d_min.astype(np.float32) * minimums)[..., None]) / np.where(wide == 0, 1, wide)
    levels = np.clip(np.round(levels), 0, 2**bits - 1).astype(np.uint8)
    pairs = levels.reshape(-1, 4, 2, 32)
    low = (pairs[:, :, 0] & 15) | (pairs[:, :, 1] & 15) << 4
    high = sum((levels[:, group] >> 4) << group for group in range(8))
    parts = [d.view(np.uint8), d_min.view(np.uint8), _six_bits(scales, minimums), high, low.reshape(-1, 128)]
    return np.concatenate([part for part in parts if bits == 5 or part is not high], axis=1)


def _coarse(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return one float16 per block and six bits per group whose products approximate the values."""
    d = (values.max(axis=1, keepdims=True) / 63).astype(np.float16)
    return d, np.round(values / np.where(d == 0, 1, d.astype(np.float32))).clip(0, 63).astype(np.uint8)


def _six_bits(scales: np.ndarray, minimums: np.ndarray) -> np.ndarray:
    upper = scales[:, 4:] >> 4 << 6, minimums[:, 4:] >> 4 << 6
    lower = scales[:, 4:] & 15 | (minimums[:, 4:] & 15) << 4
    return np.concatenate([scales[:, :4] | upper[0], minimums[:, :4] | upper[1], lower], axis=1)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 16, 16)
    steps = np.abs(groups).max(axis=2) / 31
    d = (steps.max(axis=1, keepdims=True) / 127).astype(np.float16)
    scales = np.round(steps / np.where(d == 0, 1, d.astype(np.float32))).clip(0, 127).astype(np.int8)
    wide = (d.astype(np.float32) * scales)[..., None]
    levels = np.clip(np.round(groups / np.where(wide == 0, 1, wide)) + 32, 0, 63).astype(np.uint8)
    quarters = levels.reshape(-1, 2, 4, 32)
    low = np.concatenate(
        [(quarters[:, :, i] & 15) | (quarters[:, :, i + 2] & 15) << 4 for i in range(2)], axis=2
    ).reshape(-1, 128)
    high = sum((quarters[:, :, i] >> 4) << 2 * i for i in range(4)).reshape(-1, 64)
    return np.concatenate([low, high, scales.view(np.uint8), d.view(np.uint8)], axis=1)
