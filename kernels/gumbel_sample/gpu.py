"""The noise of `gumbel_sample` on a GPU, and the exact draw from blocks of tokens. The kernels of `sample` call this.

As on the CPU (`cpu.py` has the proof), a float32 bound tells which tokens can win. One launch finds the largest bound
of every block of `BLOCK` tokens. The draw then visits the blocks in descending order of their bounds, and computes
scores in float64 until no other block can hold the winner: one or two blocks of a row.
"""

import math

import triton
import triton.language as tl

from octavo.kernels.filter_logits.gpu_rows import all_blocks, load_logits, open_row
from octavo.kernels.gumbel_sample.noise import MURMUR_1, MURMUR_2
from octavo.kernels.top_k.gpu_order import is_kept, order_key

_MURMUR_1 = tl.constexpr(MURMUR_1)
_MURMUR_2 = tl.constexpr(MURMUR_2)
_GOLDEN_64 = tl.constexpr(0x9E3779B97F4A7C15)
_SPLITMIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_SPLITMIX_2 = tl.constexpr(0x94D049BB133111EB)
# The bit pattern of a 31-bit number that is to be multiplied by 2^-31.
_CHORD_START, _CHORD_SLOPE = tl.constexpr((127 + 31) * math.log(2)), tl.constexpr(2**-23 * math.log(2))


@triton.jit
def _splitmix64(state):
    state = (state ^ (state >> 30)) * _SPLITMIX_1
    state = (state ^ (state >> 27)) * _SPLITMIX_2
    return state ^ (state >> 31)


@triton.jit
def _murmur_finalizer(word):
    word = (word ^ (word >> 16)) * _MURMUR_1
    word = (word ^ (word >> 13)) * _MURMUR_2
    return word ^ (word >> 16)


@triton.jit
def _uniform_bits(seed, position, token_ids):
    """Return the 31 bits of the noise of each token, int32; see `noise.uniform`."""
    state = _splitmix64(seed.to(tl.uint64, bitcast=True) + _GOLDEN_64)
    state = _splitmix64(state + (position + 1).to(tl.uint64, bitcast=True) * _GOLDEN_64)
    word = _murmur_finalizer(token_ids.to(tl.uint32) ^ (state >> 32).to(tl.uint32))
    word = _murmur_finalizer(word ^ (state & 0xFFFFFFFF).to(tl.uint32))
    return (word >> 1).to(tl.int32)


@triton.jit
def score_bounds(logits, ids, seed, position, is_greedy):
    """Return upper bounds of the scores, up to rounding; infinity for logits that are NaN or infinite."""
    # A chord of the logarithm: at most 0.06 above it, with a tenth of its instructions. See `native.h`.
    pattern = (_uniform_bits(seed, position, ids).to(tl.float32) + 0.5).to(tl.int32, bitcast=True)
    noise = _CHORD_START - pattern.to(tl.float32) * _CHORD_SLOPE
    bounds = tl.where(is_greedy, logits, logits + noise)
    return tl.where(logits < float("inf"), bounds, float("inf"))


@triton.jit
def _scores(logits, ids, seed, position, is_greedy):
    exact = (_uniform_bits(seed, position, ids).to(tl.float64) + 0.5) * 4.656612873077393e-10
    return logits.to(tl.float64) + tl.where(is_greedy, 0.0, -tl.log(-tl.log(1.0 - exact)))


@triton.jit
def draw_kernel(rows, least_keys_ptr, last_ids_ptr, token_ids_ptr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the kept token with the largest score, the lowest id in ties; -1 if a bound is infinite or all bounds are
    minus infinity.

    The bounds are those of `score_bounds`, computed for at least the kept tokens; for a greedy request, for all tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows.slots + row)
    least_key, last_id = tl.load(least_keys_ptr + row).to(tl.uint32, bitcast=True), tl.load(last_ids_ptr + row)
    seed, position = tl.load(rows.seed + slot), tl.load(rows.positions + row)
    is_greedy = tl.load(rows.temperature + slot) == 0.0
    opened = open_row(rows, row, slot)
    blocks = tl.arange(0, BLOCKS)
    bounds = all_blocks(rows.bounds, rows, row, BLOCKS, BLOCK)
    largest = tl.max(bounds, axis=0)
    best = tl.full((), float("-inf"), tl.float64)
    winner = tl.full((), -1, tl.int32)
    can_win = (largest < float("inf")) & (largest > float("-inf"))
    while can_win:
        block = tl.min(tl.where(bounds == largest, blocks, BLOCKS), axis=0)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        logits = load_logits(opened, ids, ids < rows.width)
        kept = (ids < rows.width) & is_kept(order_key(logits), ids, least_key, last_id)
        scores = tl.where(kept, _scores(logits, ids, seed, position, is_greedy), float("-inf"))
        score = tl.max(scores, axis=0)
        found = tl.min(tl.where(kept & (scores == score), ids, 2147483647), axis=0)
        is_better = (score > best) | ((score == best) & (found < winner))
        best = tl.where(is_better, score, best)
        winner = tl.where(is_better, found, winner)
        bounds = tl.where(blocks == block, float("-inf"), bounds)
        largest = tl.max(bounds, axis=0)
        slack = (tl.abs(best) + 64.0) * 9.5367431640625e-07  # 2^-20
        # The first block with the largest logit has the lowest such id, so a greedy draw ends here.
        can_win = (is_greedy == 0) & (largest > float("-inf")) & (largest.to(tl.float64) >= best - slack)
    tl.store(token_ids_ptr + row, winner.to(tl.int64))
