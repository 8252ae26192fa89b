"""What the Triton kernels with a state per request share: sizes of their tiles, and a function."""

import triton
import triton.language as tl

_TILE = 1024
"""Numbers of a state that one warp holds in its registers, 32 in each thread: a prompt that is alone has as many
programs as a Hopper has schedulers (512 for Qwen3-Next)."""


def tile_columns(num_rows: int, num_columns: int) -> int:
    """Return how many columns of a head's state one program has; a function of its shape alone, as bits depend on it.

    A program has whole columns, because sums run down them. Eight are a sector of memory.
    """
    return int(min(triton.next_power_of_2(num_columns), max(8, _TILE // triton.next_power_of_2(num_rows))))


@triton.jit
def softplus(x):
    """Return `log(1 + exp(x))` without overflow, exact for small results too."""
    small = tl.exp(-tl.abs(x))
    # The error of rounding 1 + small is in the divisor too (Kahan).
    rounded = 1.0 + small
    log1p = tl.where(rounded == 1.0, small, tl.log(rounded) * (small / (rounded - 1.0)))
    return tl.maximum(x, 0.0) + log1p
