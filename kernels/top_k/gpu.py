"""`top_k` on a GPU: the smallest value that is kept is found digit by digit, with no sort of the row.

Floats are mapped to integer keys with the same order. A radix search finds the key 4 bits at a time, highest bits
first: one pass over the row sums up the values under each of the 16 possible next digits. One program processes one
row, in a fixed order. `filter_logits` uses the same search with probabilities as weights where `top_k` counts; the
functions that it shares are public.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Values that are processed at a time."""
NUM_WARPS = 8


def top_k(values_V: Tensor, k: int) -> Tensor:
    """See `octavo.kernels.top_k.top_k`."""
    return top_k_of_rows(values_V.unsqueeze(0), k)[0]


def top_k_of_rows(values_RV: Tensor, k: int) -> Tensor:
    """Return the int64 indices of the `k` largest values of every row, as `top_k` does; does not synchronize."""
    num_rows, count = values_RV.shape
    k = min(k, count)
    keys_R = torch.empty(num_rows, dtype=torch.int32, device=values_RV.device)
    last_ids_R = torch.empty_like(keys_R)
    if not num_rows or not k:
        return torch.empty(num_rows, k, dtype=torch.int64, device=values_RV.device)
    _top_k_kernel[(num_rows,)](
        values_RV, keys_R, last_ids_R, values_RV.stride(0), count, k, BLOCK=BLOCK, num_warps=NUM_WARPS
    )
    ids_RK, _ = select(values_RV, keys_R, last_ids_R, k)
    order_RK = values_RV.gather(1, ids_RK).argsort(dim=1, descending=True, stable=True)
    return ids_RK.gather(1, order_RK)


def select(values_RV: Tensor, keys_R: Tensor, last_ids_R: Tensor, max_kept: int) -> tuple[Tensor, Tensor]:
    """Return ids_RK, ascending, of the values that `is_kept`, and their number in each row, int32.

    Args:
        values_RV: float32; rows are contiguous.
        keys_R, last_ids_R: the smallest key that is kept, and the last index among equal keys.
        max_kept: K, at least the number kept of any row; entries after a row's last one are undefined.
    """
    num_rows, count = values_RV.shape
    ids_RK = torch.zeros(num_rows, max_kept, dtype=torch.int64, device=values_RV.device)
    counts_R = torch.empty(num_rows, dtype=torch.int32, device=values_RV.device)
    _select_kernel[(num_rows,)](
        values_RV,
        keys_R,
        last_ids_R,
        ids_RK,
        counts_R,
        values_RV.stride(0),
        count,
        max_kept,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return ids_RK, counts_R


@triton.jit
def order_key(values):
    """Return uint32 keys in the order of the float32 `values`; both zeros have the same key."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def value_of_key(key):
    """Return the float32 value of an order key."""
    bits = key.to(tl.int32, bitcast=True)
    return (bits ^ (((bits ^ -1) >> 31) | -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def is_kept(keys, ids, least_key, last_id):
    """Return which values are above the smallest key, or equal to it and not after the last index."""
    return (keys > least_key) | ((keys == least_key) & (ids <= last_id))


@triton.jit
def search(row_ptr, count, target, above_key, largest, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Find the largest key such that the values with this key or a larger one weigh at least `target`.

    A value weighs 1, or with BY_MASS exp(value - largest). Values whose key is not larger than `above_key` are ignored.
    If all values together weigh less than `target`, the result is the smallest key.

    Returns:
        the key, uint32, and the weight of all values above it, float64.
    """
    digits = tl.arange(0, 16)
    found = tl.full((), 0, tl.uint32)
    above = tl.full((), 0.0, tl.float64)
    for step in range(8):
        shift = 28 - 4 * step
        weights = tl.zeros((16,), tl.float64)
        for start in range(0, count, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            values = tl.load(row_ptr + ids, mask=ids < count, other=float("-inf"))
            keys = order_key(values)
            # Two shifts, because a shift by 32 is undefined.
            is_under = (ids < count) & (keys > above_key) & ((((keys ^ found) >> shift) >> 4) == 0)
            if tl.max(is_under.to(tl.int32), axis=0) > 0:
                digit = ((keys >> shift) & 15).to(tl.int32)
                weight = tl.exp(values - largest) if BY_MASS else tl.full((BLOCK,), 1.0, tl.float32)
                is_here = (digit[None, :] == digits[:, None]) & is_under[None, :]
                weights += tl.sum(tl.where(is_here, weight[None, :], 0.0), axis=1).to(tl.float64)
        from_digit = tl.sum(tl.where(digits[None, :] >= digits[:, None], weights[None, :], 0.0), axis=1)
        reaching = tl.max(tl.where(above + from_digit >= target, digits, -1), axis=0)
        smallest = tl.min(tl.where(weights > 0.0, digits, 15), axis=0)
        chosen = tl.where(reaching >= 0, reaching, smallest)
        above += tl.sum(tl.where(digits > chosen, weights, 0.0), axis=0)
        found = found | (chosen.to(tl.uint32) << shift)
    return found, above


@triton.jit
def count_of_key(row_ptr, count, key, BLOCK: tl.constexpr):
    """Return how many values have this key."""
    found = tl.full((), 0, tl.int32)
    for start in range(0, count, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        keys = order_key(tl.load(row_ptr + ids, mask=ids < count, other=0.0))
        found += tl.sum(((keys == key) & (ids < count)).to(tl.int32), axis=0)
    return found


@triton.jit
def last_of_key(row_ptr, count, key, num_kept, BLOCK: tl.constexpr):
    """Return the index of the `num_kept`-th value with this key, counted from 1; the last index if there are fewer."""
    last = count - 1
    before = tl.full((), 0, tl.int32)
    for start in range(0, count, BLOCK):
        if before < num_kept:
            ids = start + tl.arange(0, BLOCK)
            keys = order_key(tl.load(row_ptr + ids, mask=ids < count, other=0.0))
            is_equal = (keys == key) & (ids < count)
            number = before + tl.cumsum(is_equal.to(tl.int32), axis=0)
            last = tl.minimum(last, tl.min(tl.where(is_equal & (number == num_kept), ids, count - 1), axis=0))
            before += tl.sum(is_equal.to(tl.int32), axis=0)
    return last


@triton.jit
def _top_k_kernel(values_ptr, keys_ptr, last_ids_ptr, row_stride, count, k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = values_ptr + row * row_stride
    nothing = tl.full((), 0, tl.uint32)
    key, above = search(row_ptr, count, k, nothing, 0.0, False, BLOCK)
    tl.store(keys_ptr + row, key.to(tl.int32, bitcast=True))
    tl.store(last_ids_ptr + row, last_of_key(row_ptr, count, key, k - above.to(tl.int32), BLOCK))


@triton.jit
def _select_kernel(
    values_ptr, keys_ptr, last_ids_ptr, ids_ptr, counts_ptr, row_stride, count, max_kept, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    least_key = tl.load(keys_ptr + row).to(tl.uint32, bitcast=True)
    last_id = tl.load(last_ids_ptr + row)
    num_kept = tl.full((), 0, tl.int32)
    for start in range(0, count, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        keys = order_key(tl.load(values_ptr + row * row_stride + ids, mask=ids < count, other=0.0))
        kept = is_kept(keys, ids, least_key, last_id) & (ids < count)
        place = num_kept + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(ids_ptr + row * max_kept + place, ids.to(tl.int64), mask=kept & (place < max_kept))
        num_kept += tl.sum(kept.to(tl.int32), axis=0)
    tl.store(counts_ptr + row, num_kept)
