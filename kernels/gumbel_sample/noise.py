"""The random function behind sampling: (seed, position, token id) to a number in (0, 1).

Seed and position are mixed into two 32-bit keys by the SplitMix64 finalizer (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014). Each key then enters the token id before a round of the 32-bit finalizer
of MurmurHash3 (Austin Appleby, public domain). Only integers are involved, so every machine and every back end gets the
same uniforms.
"""

import math

_MASK_32 = 2**32 - 1
_MASK_64 = 2**64 - 1
_GOLDEN_64 = 0x9E3779B97F4A7C15

MURMUR_1 = 0x85EBCA6B
MURMUR_2 = 0xC2B2AE35

NUM_UNIFORM_BITS = 31
"""Uniforms are the midpoints of 2^31 equal intervals: never 0, never 1."""


def step_keys(seed: int, position: int) -> tuple[int, int]:
    """Return the two 32-bit keys of one draw."""
    state = _splitmix64((seed + _GOLDEN_64) & _MASK_64)
    state = _splitmix64((state + (position + 1) * _GOLDEN_64) & _MASK_64)
    return state >> 32, state & _MASK_32


def uniform(keys: tuple[int, int], token_id: int) -> float:
    """Return the uniform number of one token."""
    word = _murmur_finalizer(_murmur_finalizer(token_id ^ keys[0]) ^ keys[1])
    return uniform_of_bits(word >> (32 - NUM_UNIFORM_BITS))


def uniform_of_bits(bits: int) -> float:
    """Return the midpoint of interval number `bits`."""
    return (bits + 0.5) * 2.0**-NUM_UNIFORM_BITS


def gumbel(complement: float) -> float:
    """Return the Gumbel noise of the uniform `1 - complement`.

    Uses scalar `math` functions on purpose: vectorized ones may round differently depending on the place in a tensor.
    """
    return -math.log(-math.log1p(-complement))


def _splitmix64(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return state ^ (state >> 31)


def _murmur_finalizer(word: int) -> int:
    word = ((word ^ (word >> 16)) * MURMUR_1) & _MASK_32
    word = ((word ^ (word >> 13)) * MURMUR_2) & _MASK_32
    return word ^ (word >> 16)
