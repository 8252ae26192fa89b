"""`gumbel_sample` on a GPU: the same integers as on the CPU, and the same order of exact scores.

One program draws for one row. As on the CPU (`cpu.py` says why that is right), a bound in float32 tells which blocks of
candidates can hold the winner, and only those get scores in float64: a handful of each row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gumbel_sample.noise import MURMUR_1, MURMUR_2
from octavo.kernels.top_k.gpu import BLOCK, NUM_WARPS, is_kept, order_key

_MURMUR_1 = tl.constexpr(MURMUR_1)
_MURMUR_2 = tl.constexpr(MURMUR_2)
_GOLDEN_64 = tl.constexpr(0x9E3779B97F4A7C15)
_SPLITMIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_SPLITMIX_2 = tl.constexpr(0x94D049BB133111EB)


def gumbel_sample(logits_C: Tensor, token_ids_C: Tensor, *, seed: int, position: int) -> int:
    """See `octavo.kernels.gumbel_sample.gumbel_sample`; waits for the GPU."""
    device = logits_C.device
    signed = seed - 2**64 if seed >= 2**63 else seed
    token_ids_R = draw(
        logits_C.contiguous().unsqueeze(0),
        torch.ones(1, dtype=torch.float32, device=device),
        torch.tensor([signed], dtype=torch.int64, device=device),
        torch.tensor([position], dtype=torch.int64, device=device),
        token_ids_C=token_ids_C,
    )
    return int(token_ids_R[0])


def draw(
    logits_RV: Tensor,
    temperature_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    *,
    thresholds: tuple[Tensor, Tensor] | None = None,
    token_ids_C: Tensor | None = None,
) -> Tensor:
    """Return the int64 token that each row draws; -1 where a logit is NaN or plus infinity, or none is finite.

    Args:
        logits_RV: float32, divided by the temperature; rows are contiguous.
        temperature_R: float32; 0 takes the most likely token, without noise. Other values have no effect.
        seeds_R: int64, the bits of the unsigned seeds.
        positions_R: int64, the number of tokens before the one that is drawn.
        thresholds: which tokens may be drawn, see `filter_logits.gpu.thresholds`.
        token_ids_C: int64, ascending: the tokens of the columns; None: the columns are the vocabulary.
    """
    num_rows, count = logits_RV.shape
    token_ids_R = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
    keys_R, last_ids_R = thresholds if thresholds is not None else (token_ids_R, token_ids_R)
    if num_rows:
        _draw_kernel[(num_rows,)](
            logits_RV,
            temperature_R,
            seeds_R,
            positions_R,
            keys_R,
            last_ids_R,
            token_ids_R if token_ids_C is None else token_ids_C,
            token_ids_R,
            logits_RV.stride(0),
            count,
            HAS_THRESHOLDS=thresholds is not None,
            HAS_IDS=token_ids_C is not None,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return token_ids_R


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
def _draw_kernel(
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    keys_ptr,
    last_ids_ptr,
    candidates_ptr,
    token_ids_ptr,
    row_stride,
    count,
    HAS_THRESHOLDS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    is_greedy = tl.load(temperature_ptr + row) == 0.0
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    best = tl.full((), float("-inf"), tl.float64)
    winner = tl.full((), -1, tl.int32)
    num_bad = tl.full((), 0, tl.int32)
    for start in range(0, count, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        kept = columns < count
        logits = tl.load(logits_ptr + row * row_stride + columns, mask=kept, other=float("-inf"))
        num_bad += tl.sum((kept & ((logits < float("inf")) == 0)).to(tl.int32), axis=0)
        if HAS_THRESHOLDS:
            least_key = tl.load(keys_ptr + row).to(tl.uint32, bitcast=True)
            kept = kept & (is_greedy | is_kept(order_key(logits), columns, least_key, tl.load(last_ids_ptr + row)))
        ids = tl.load(candidates_ptr + columns, mask=kept, other=0).to(tl.int32) if HAS_IDS else columns
        bits = _uniform_bits(seed, position, ids)
        complement = (bits.to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
        bounds = tl.where(is_greedy, logits, logits - tl.log(complement))
        bound = tl.max(tl.where(kept, bounds, float("-inf")), axis=0).to(tl.float64)
        slack = (tl.abs(best) + 64.0) * 9.5367431640625e-07  # 2^-20
        if (bound >= best - slack) & (bound > float("-inf")):
            exact = (bits.to(tl.float64) + 0.5) * 4.656612873077393e-10
            noise = tl.where(is_greedy, 0.0, -tl.log(-tl.log(1.0 - exact)))
            scores = tl.where(kept, logits.to(tl.float64) + noise, float("-inf"))
            largest = tl.max(scores, axis=0)
            if largest > best:
                best = largest
                winner = tl.min(tl.where(scores == largest, ids, 2147483647), axis=0)
    tl.store(token_ids_ptr + row, tl.where(num_bad > 0, -1, winner).to(tl.int64))
