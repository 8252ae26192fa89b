"""`store_kv` on a GPU: one program copies the keys and values of one token."""

import triton
import triton.language as tl
from torch import Tensor

E4M3_MAX = tl.constexpr(448.0)
"""The largest number of float8_e4m3fn, which has no infinity."""


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
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        heads = tl.arange(0, HEADS_BLOCK)[:, None]
        dims = tl.arange(0, HEAD_DIM_BLOCK)[None, :]
        is_in = (heads < NUM_HEADS) & (dims < HEAD_DIM)
        place = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride + heads * head_stride + dims
        k = tl.load(k_ptr + token * k_token_stride + heads * k_head_stride + dims, mask=is_in)
        if v_ptr is not None:
            v = tl.load(v_ptr + token * v_token_stride + heads * v_head_stride + dims, mask=is_in)
        tl.store(k_cache_ptr + place, stored(k, k_cache_ptr.dtype.element_ty, k_factor), mask=is_in)
        if v_ptr is not None:
            tl.store(v_cache_ptr + place, stored(v, v_cache_ptr.dtype.element_ty, v_factor), mask=is_in)
