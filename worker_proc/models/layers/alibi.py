"""Slopes of attention with linear biases (ALiBi: Press, Smith and Lewis, arXiv 2108.12409)."""

import math

from octavo.worker_proc.parallel.sharding import Sharding


def alibi_slopes(num_heads: int) -> list[float]:
    """Return 2^(-8 / n), 2^(-16 / n), ... for n heads. If n is not a power of 2, the last slopes are those of 2n
    heads."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    return slopes + [2.0 ** (-4.0 * (2 * head + 1) / power) for head in range(num_heads - power)]


def mpt_slopes(num_heads: int, largest: int) -> list[float]:
    """Return the slopes of MPT, whose order differs if the number of heads is not a power of 2."""
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-largest * (head + 1) / power) for head in range(power)]
    return slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]


def of_rank(slopes: list[float], sharding: Sharding) -> tuple[float, ...]:
    """Return the slopes of the heads that a rank holds."""
    count = len(slopes) // sharding.size
    return tuple(slopes[sharding.rank * count : (sharding.rank + 1) * count])
