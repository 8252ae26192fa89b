"""`filter_logits` on a GPU: thresholds found by search, no sort. See `octavo.kernels.top_k.gpu` for the search."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.top_k.gpu import (
    BLOCK,
    NUM_WARPS,
    count_of_key,
    last_of_key,
    order_key,
    search,
    select,
    value_of_key,
)


def filter_logits(logits_V: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """See `octavo.kernels.filter_logits.filter_logits`; synchronizes, to read the number of kept tokens."""
    device = logits_V.device
    keys_R, last_ids_R = thresholds(
        logits_V.unsqueeze(0),
        torch.tensor([top_k], dtype=torch.int32, device=device),
        torch.tensor([top_p], dtype=torch.float64, device=device),
        torch.tensor([math.log(min_p) if min_p > 0 else -math.inf], dtype=torch.float32, device=device),
    )
    ids_RK, counts_R = select(logits_V.unsqueeze(0), keys_R, last_ids_R, logits_V.numel())
    return ids_RK[0, : int(counts_R[0])]


def thresholds(logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, log_min_p_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest key that each row keeps, as the bits of int32, and the last index kept among equal keys.

    For `octavo.kernels.top_k.gpu.is_kept`. The result for a row whose largest logit is not finite is undefined.

    Args:
        logits_RV: float32, divided by the temperature; rows are contiguous.
        top_k_R: int32, 0 keeps all.
        top_p_R: float64, like the sums that it is compared with; 1 keeps all.
        log_min_p_R: float32, the logarithm; minus infinity keeps all.
    """
    num_rows, count = logits_RV.shape
    keys_R = torch.empty(num_rows, dtype=torch.int32, device=logits_RV.device)
    last_ids_R = torch.empty_like(keys_R)
    if num_rows:
        _thresholds_kernel[(num_rows,)](
            logits_RV,
            top_k_R,
            top_p_R,
            log_min_p_R,
            keys_R,
            last_ids_R,
            logits_RV.stride(0),
            count,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return keys_R, last_ids_R


@triton.jit
def _largest(row_ptr, count, BLOCK: tl.constexpr):
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, count, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(row_ptr + ids, mask=ids < count, other=float("-inf")))
    return tl.max(largest, axis=0)


@triton.jit
def _mass_above(row_ptr, count, key, largest, BLOCK: tl.constexpr):
    """Return the weight of all logits above a key: the exponentials of their distance from the largest."""
    mass = tl.full((), 0.0, tl.float64)
    for start in range(0, count, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + ids, mask=ids < count, other=float("-inf"))
        is_above = (order_key(logits) > key) & (ids < count)
        mass += tl.sum(tl.where(is_above, tl.exp(logits - largest), 0.0), axis=0).to(tl.float64)
    return mass


@triton.jit
def _thresholds_kernel(
    logits_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, keys_ptr, last_ids_ptr, row_stride, count, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    largest = _largest(row_ptr, count, BLOCK)
    # min_p keeps all from this key upwards, equal ones included.
    key = order_key(largest + tl.load(log_min_p_ptr + row))
    num_equal = count
    if (top_k > 0) & (top_k < count):
        from_key = tl.where(key > 0, key - 1, key)
        k_key, num_above = search(row_ptr, count, top_k, from_key, largest, False, BLOCK)
        key = tl.maximum(key, k_key)
        num_equal = top_k - num_above.to(tl.int32)
    if top_p < 1.0:
        num_equal = tl.minimum(num_equal, count_of_key(row_ptr, count, key, BLOCK))
        weight = tl.exp(value_of_key(key) - largest).to(tl.float64)
        mass = _mass_above(row_ptr, count, key, largest, BLOCK)
        target = top_p * (mass + num_equal.to(tl.float64) * weight)
        if target <= mass:
            key, mass = search(row_ptr, count, target, key, largest, True, BLOCK)
            weight = tl.exp(value_of_key(key) - largest).to(tl.float64)
            num_equal = count
        num_needed = tl.ceil((target - mass) / weight)
        num_equal = tl.minimum(num_equal.to(tl.float64), tl.maximum(num_needed, 1.0)).to(tl.int32)
    last_id = count - 1
    if num_equal < count:
        last_id = last_of_key(row_ptr, count, key, num_equal, BLOCK)
    tl.store(keys_ptr + row, key.to(tl.int32, bitcast=True))
    tl.store(last_ids_ptr + row, last_id)
