"""The contents of the blocks of GGUF's quantized types, and how to decode their numbers."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float16] | npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Parts:
    """The contents of a tensor's blocks; the first dimension of each array counts blocks."""

    levels: Bytes
    """Any further shape, in the order of the values; at most 4 bits for `bits` = 4."""
    scales: Floats
    """One scale per group."""
    minimums: Floats | None = None
    """One minimum per group."""
    bits: int = 4
    offset: int = 0
    """Level that means 0, if there are no minimums."""
    used_levels: tuple[int, ...] | None = None
    """See `QuantizedWeight`."""


def halves(blocks: Bytes, start: int, count: int = 1) -> npt.NDArray[np.float16]:
    """Return `count` float16 numbers of each block, from byte `start` on."""
    return np.ascontiguousarray(blocks[:, start : start + 2 * count]).view(np.float16)


def nibbles(packed: Bytes) -> Bytes:
    """Return the low 4 bits of the bytes of the last dimension, then the high ones, along a new dimension before it."""
    levels = np.empty((*packed.shape[:-1], 2, packed.shape[-1]), np.uint8)
    # Written in place: 70 ms for 100 million levels, a fifth of the time of a broadcast shift.
    np.bitwise_and(packed, 15, out=levels[..., 0, :])
    np.right_shift(packed, 4, out=levels[..., 1, :])
    return levels
