"""`store_kv` on a GPU: one program copies the keys and values of one token."""

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.paged_attention.int8_cache import LARGEST, SCALE_BYTES

E4M3_MAX = tl.constexpr(448.0)
"""The largest number of float8_e4m3fn, which has no infinity."""
LARGEST_LEVEL = tl.constexpr(float(LARGEST))
SCALE_PITCH = tl.constexpr(SCALE_BYTES)


def store_kv(
    k_TKH: Tensor,
    v_TKH: Tensor | None,
    k_cache_PSKH: Tensor,
    v_cache_PSKH: Tensor,
    slot_mapping_T: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """See `octavo.kernels.store_kv.store_kv`.

    The caches may be views in which the slots of a head are contiguous instead of the heads of a slot. A token with a
    negative slot is padding and is not stored.
    """
    num_tokens, num_heads, head_dim = k_TKH.shape
    k = k_TKH if k_TKH.stride(2) == 1 else k_TKH.contiguous()
    v = v_TKH if v_TKH is None or v_TKH.stride(2) == 1 else v_TKH.contiguous()
    if num_tokens:
        _store_kv_kernel[(num_tokens,)](
            k,
            v,
            k_cache_PSKH,
            v_cache_PSKH,
            slot_mapping_T,
            1.0 / k_scale,
            1.0 / v_scale,
            k.stride(0),
            k.stride(1),
            0 if v is None else v.stride(0),
            0 if v is None else v.stride(1),
            k_cache_PSKH.stride(0),
            k_cache_PSKH.stride(1),
            k_cache_PSKH.stride(2),
            BLOCK_SIZE=k_cache_PSKH.shape[1],
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            HEADS_BLOCK=triton.next_power_of_2(num_heads),
            HEAD_DIM_BLOCK=triton.next_power_of_2(head_dim),
        )


@triton.jit
def stored(x, dtype: tl.constexpr, factor):
    """Return keys or values in the cache's `dtype`; in 8 bits they are multiplied by a factor first."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32) * factor, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit
def row_scale(largest, is_finite):
    """Return the scale of a row of 8-bit integers and its inverse, as `int8_cache` defines them."""
    ones = tl.zeros_like(largest) + 1.0
    scale = tl.div_rn(largest, ones * LARGEST_LEVEL)
    inverse = tl.where(is_finite & (scale > 0.0), tl.div_rn(ones, scale), 0.0)
    return tl.where(is_finite, scale, float("nan")), inverse


@triton.jit
def levels(x, is_finite, inverse):
    """Return numbers as levels of a scale."""
    scaled = tl.where(is_finite, x.to(tl.float32) * inverse, 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST_LEVEL), LARGEST_LEVEL)
    # 1.5 * 2^23: the sum has no bits left for a fraction, and so is rounded, ties to even.
    return ((scaled + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def largest_of(x):
    """Return the largest magnitudes of rows, and whether all their numbers are finite, as columns."""
    magnitudes = tl.abs(x.to(tl.float32))
    num_infinite = tl.max((magnitudes < float("inf")).to(tl.int32) ^ 1, axis=1, keep_dims=True)
    return tl.max(magnitudes, axis=1, keep_dims=True), num_infinite == 0


@triton.jit
def store_heads(cache_ptr, scale_place, place, x, is_head, is_in, factor):
    """Store keys or values of one slot, a row for each head, and their scales if there are any.

    `x` is 0 where it is padding. `scale_place` is that of the scale of each head.
    """
    dtype: tl.constexpr = cache_ptr.dtype.element_ty
    if dtype == tl.int8:
        largest, is_finite = largest_of(x)
        scale, inverse = row_scale(largest, is_finite)
        tl.store(cache_ptr + place, levels(x, is_finite, inverse), mask=is_in)
        store_scales(cache_ptr + scale_place, scale, is_head)
    else:
        tl.store(cache_ptr + place, stored(x, dtype, factor), mask=is_in)


@triton.jit
def store_scales(pointers, scale, is_head):
    """Store the scales of rows behind the levels of their block."""
    tl.store(pointers.to(tl.pointer_type(tl.float32), bitcast=True), scale, mask=is_head)


@triton.jit
def _store_kv_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_factor,
    v_factor,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    block_stride,
    slot_stride,
    head_stride,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HEAD_DIM_BLOCK: tl.constexpr,
):
    """Program t copies all heads of token t. Without `v`, values are part of the keys."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        heads = tl.arange(0, HEADS_BLOCK)[:, None]
        dims = tl.arange(0, HEAD_DIM_BLOCK)[None, :]
        is_in = (heads < NUM_HEADS) & (dims < HEAD_DIM)
        block = (slot // BLOCK_SIZE) * block_stride + heads * head_stride
        place = block + (slot % BLOCK_SIZE) * slot_stride + dims
        scale_place = block + BLOCK_SIZE * HEAD_DIM + (slot % BLOCK_SIZE) * SCALE_PITCH
        is_head = heads < NUM_HEADS
        k = tl.load(k_ptr + token * k_token_stride + heads * k_head_stride + dims, mask=is_in, other=0.0)
        if v_ptr is not None:
            v = tl.load(v_ptr + token * v_token_stride + heads * v_head_stride + dims, mask=is_in, other=0.0)
        store_heads(k_cache_ptr, scale_place, place, k, is_head, is_in, k_factor)
        if v_ptr is not None:
            store_heads(v_cache_ptr, scale_place, place, v, is_head, is_in, v_factor)
