"""`top_k` on a GPU: the smallest value that is kept is found digit by digit, with no sort of the row.

Floats are taken for integers that rise with them. Of such a key 4 bits at a time are found, highest first: one pass
over the row adds up what lies under each of the 16 values of the next digit. One program works on one row, in one
order. What is shared with `filter_logits`, which weighs tokens by their probability where this counts them, has public
names.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Values in flight."""
NUM_WARPS = 8


def top_k(values_V: Tensor, k: int) -> Tensor:
    """See `octavo.kernels.top_k.top_k`."""
    return top_k_of_rows(values_V.unsqueeze(0), k)[0]


def top_k_of_rows(values_RV: Tensor, k: int) -> Tensor:
    """Return the int64 indices of the `k` largest values of every row, ordered as `top_k` does; waits for nothing."""
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
    """Return ids_RK, rising, of the values that `is_kept`, and how many there are of each row, int32.

    Args:
        values_RV: float32; the values of a row lie side by side.
        keys_R, last_ids_R: the least key that is kept, and of values with that key the last index.
        max_kept: K, no fewer than are kept of any row; behind the last one of a row stands anything.
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
    """Return uint32 numbers in the order of the float32 `values`; zeros of both signs are equal."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def value_of_key(key):
    """Return the float32 number of an order key."""
    bits = key.to(tl.int32, bitcast=True)
    return (bits ^ (((bits ^ -1) >> 31) | -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def is_kept(keys, ids, least_key, last_id):
    """Say which values lie above the least key, or at it and not behind the last index."""
    return (keys > least_key) | ((keys == least_key) & (ids <= last_id))


@triton.jit
def search(row_ptr, count, target, above_key, largest, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Find the largest key for which the values from it upwards weigh at least `target`.

    A value weighs 1, or with BY_MASS the exponential of its distance from `largest`. Values whose key is not larger
    than `above_key` are left out. If all together weigh less than `target`, the least key is found.

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
            # In two shifts, because one by 32 is undefined.
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
    """Return the index of the value that is number `num_kept`, from 1, among those of this key; else the last index."""
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
