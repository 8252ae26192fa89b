"""Shared by the Triton kernels of recurrent operations: tile sizes, and `softplus`."""

import triton
import triton.language as tl

_TILE = 1024
"""State elements that one warp holds in its registers, 32 per thread. A single prompt then has as many programs as a
Hopper GPU has warp schedulers (512 for Qwen3-Next)."""


def tile_columns(num_rows: int, num_columns: int) -> int:
    """Return how many columns of a head's state one program computes: a function of the shape alone, as bits depend on
    it.

    A program takes complete columns, because sums run down the columns. Eight float32 columns are one 32-byte memory
    sector.
    """
    return int(min(triton.next_power_of_2(num_columns), max(8, _TILE // triton.next_power_of_2(num_rows))))


@triton.jit
def softplus(x):
    """Return `log(1 + exp(x))` without overflow, exact for small results too."""
    small = tl.exp(-tl.abs(x))
    # Dividing by the rounded 1 + small, less 1, cancels the rounding error of 1 + small (Kahan).
    rounded = 1.0 + small
    log1p = tl.where(rounded == 1.0, small, tl.log(rounded) * (small / (rounded - 1.0)))
    return tl.maximum(x, 0.0) + log1p
