"""`rope_store_kv` on a GPU: one program handles a few heads of one token, either queries or keys with their values."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.programmatic_launch import launch_options
from octavo.kernels.programmatic_launch.gpu import begin
from octavo.kernels.rope_store_kv.rotation import Rotation
from octavo.kernels.store_kv.gpu import SCALE_PITCH, largest_of, levels, row_scale, store_heads, store_scales, stored

MAX_HEADS_BLOCK = 8
"""Heads of one program: with 16 bits and 128 dimensions, two warps whose threads load 16 bytes at a time.
Heads that are normalized always have so many, however few a rank has: the threads decide how squares are added up."""
_PAIRS_OF_A_WARP = 256


def rope_store_kv(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    rotation: Rotation,
    k_cache_PSKH: Tensor,
    v_cache_PSKH: Tensor,
    slot_mapping_T: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """See `octavo.kernels.rope_store_kv.rope_store_kv`, and `store_kv` on a GPU for its caches and negative slots."""
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q_TNH, k_TKH, v_TKH))
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_pairs = k.shape[1], rotation.cos_TC.shape[1]
    out_TNH = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    norm = rotation.norm
    usual_heads = max(num_heads, num_kv_heads) if norm is None else MAX_HEADS_BLOCK
    heads_block = min(triton.next_power_of_2(usual_heads), MAX_HEADS_BLOCK)
    pairs_block, num_query_blocks = triton.next_power_of_2(num_pairs), triton.cdiv(num_heads, heads_block)
    if num_tokens:
        _rope_store_kv_kernel[(num_tokens, num_query_blocks + triton.cdiv(num_kv_heads, heads_block))](
            q,
            k,
            v,
            rotation.cos_TC.contiguous(),
            rotation.sin_TC.contiguous(),
            None if norm is None else norm.q_weight_H.contiguous(),
            None if norm is None else norm.k_weight_H.contiguous(),
            out_TNH,
            k_cache_PSKH,
            v_cache_PSKH,
            slot_mapping_T,
            0.0 if norm is None else norm.eps,
            1.0 / k_scale,
            1.0 / v_scale,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            k_cache_PSKH.stride(0),
            k_cache_PSKH.stride(1),
            k_cache_PSKH.stride(2),
            BLOCK_SIZE=k_cache_PSKH.shape[1],
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            NUM_QUERY_BLOCKS=num_query_blocks,
            HEAD_DIM=head_dim,
            NUM_PAIRS=num_pairs,
            HAS_NORM=norm is not None,
            HEADS_BLOCK=heads_block,
            PAIRS_BLOCK=pairs_block,
            REST_BLOCK=triton.next_power_of_2(max(head_dim - 2 * num_pairs, 1)),
            HEAD_DIM_BLOCK=triton.next_power_of_2(head_dim),
            num_warps=max(heads_block * pairs_block // _PAIRS_OF_A_WARP, 1),
            **launch_options(),
        )
    return out_TNH


@triton.jit  # long: one kernel, mostly parameters
def _rope_store_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    eps,
    k_factor,
    v_factor,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    block_stride,
    slot_stride,
    cache_head_stride,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_QUERY_BLOCKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEAD_DIM_BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Program (t, p) handles a block of heads of token t: queries if p < NUM_QUERY_BLOCKS, otherwise keys and values.

    Queries go to `out`; keys and values to the cache, unless the token's slot is negative.
    """
    begin(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    pairs = tl.arange(0, PAIRS_BLOCK)
    cos = tl.load(cos_ptr + token * NUM_PAIRS + pairs, mask=pairs < NUM_PAIRS, other=0.0)
    sin = tl.load(sin_ptr + token * NUM_PAIRS + pairs, mask=pairs < NUM_PAIRS, other=0.0)
    heads = tl.arange(0, HEADS_BLOCK)[:, None]
    if part < NUM_QUERY_BLOCKS:
        heads += part * HEADS_BLOCK
        x = q_ptr + token * q_token_stride + heads * q_head_stride
        out = out_ptr + (token * NUM_HEADS + heads) * HEAD_DIM
        is_head = heads < NUM_HEADS
        _rotate(
            x,
            out,
            None,
            is_head,
            cos,
            sin,
            q_weight_ptr,
            eps,
            1.0,
            HEAD_DIM,
            NUM_PAIRS,
            HAS_NORM,
            PAIRS_BLOCK,
            REST_BLOCK,
        )
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            heads += (part - NUM_QUERY_BLOCKS) * HEADS_BLOCK
            block = (slot // BLOCK_SIZE) * block_stride + heads * cache_head_stride
            place = block + (slot % BLOCK_SIZE) * slot_stride
            scale_place = block + BLOCK_SIZE * HEAD_DIM + (slot % BLOCK_SIZE) * SCALE_PITCH
            x = k_ptr + token * k_token_stride + heads * k_head_stride
            is_head = heads < NUM_KV_HEADS
            out = k_cache_ptr + place
            _rotate(
                x,
                out,
                k_cache_ptr + scale_place,
                is_head,
                cos,
                sin,
                k_weight_ptr,
                eps,
                k_factor,
                HEAD_DIM,
                NUM_PAIRS,
                HAS_NORM,
                PAIRS_BLOCK,
                REST_BLOCK,
            )
            dims = tl.arange(0, HEAD_DIM_BLOCK)[None, :]
            is_in = is_head & (dims < HEAD_DIM)
            v = tl.load(v_ptr + token * v_token_stride + heads * v_head_stride + dims, mask=is_in, other=0.0)
            store_heads(v_cache_ptr, scale_place, place + dims, v, is_head, is_in, v_factor)


@triton.jit
def _rotate(
    x_ptr,
    out_ptr,
    scale_ptr,
    is_head,
    cos,
    sin,
    weight_ptr,
    eps,
    factor,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Normalize and rotate a block of heads; the pointers are to the first number of each, and to its scale."""
    pairs = tl.arange(0, PAIRS_BLOCK)[None, :]
    rest = 2 * NUM_PAIRS + tl.arange(0, REST_BLOCK)[None, :]
    is_pair, is_rest = pairs < NUM_PAIRS, rest < HEAD_DIM
    first = tl.load(x_ptr + pairs, mask=is_head & is_pair, other=0.0)
    second = tl.load(x_ptr + NUM_PAIRS + pairs, mask=is_head & is_pair, other=0.0).to(tl.float32)
    dtype: tl.constexpr = first.dtype
    out_dtype: tl.constexpr = out_ptr.dtype.element_ty
    first = first.to(tl.float32)
    if HEAD_DIM > 2 * NUM_PAIRS:
        third = tl.load(x_ptr + rest, mask=is_head & is_rest, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first + second * second, axis=1, keep_dims=True)
        if HEAD_DIM > 2 * NUM_PAIRS:
            squares += tl.sum(third * third, axis=1, keep_dims=True)
        inverse = tl.rsqrt(squares / HEAD_DIM + eps)
        first = _scaled(first * inverse, weight_ptr + pairs, is_pair, dtype)
        second = _scaled(second * inverse, weight_ptr + NUM_PAIRS + pairs, is_pair, dtype)
        if HEAD_DIM > 2 * NUM_PAIRS:
            third = _scaled(third * inverse, weight_ptr + rest, is_rest, dtype)
    cos, sin = cos[None, :], sin[None, :]
    left, right = (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)
    if out_dtype == tl.int8:
        largest, is_finite = largest_of(left)
        largest_right, is_right_finite = largest_of(right)
        largest, is_finite = tl.maximum(largest, largest_right), is_finite & is_right_finite
        if HEAD_DIM > 2 * NUM_PAIRS:
            largest_rest, is_rest_finite = largest_of(third)
            largest, is_finite = tl.maximum(largest, largest_rest), is_finite & is_rest_finite
        scale, factor = row_scale(largest, is_finite)
        left, right = levels(left, is_finite, factor), levels(right, is_finite, factor)
        if HEAD_DIM > 2 * NUM_PAIRS:
            third = levels(third.to(dtype), is_finite, factor)
        store_scales(scale_ptr, scale, is_head)
    else:
        left, right = stored(left, out_dtype, factor), stored(right, out_dtype, factor)
        if HEAD_DIM > 2 * NUM_PAIRS:
            third = stored(third.to(dtype), out_dtype, factor)
    tl.store(out_ptr + pairs, left, mask=is_head & is_pair)
    tl.store(out_ptr + NUM_PAIRS + pairs, right, mask=is_head & is_pair)
    if HEAD_DIM > 2 * NUM_PAIRS:
        tl.store(out_ptr + rest, third, mask=is_head & is_rest)


@triton.jit
def _scaled(x, weight_ptrs, is_in, dtype: tl.constexpr):
    """Multiply by the weight, rounding before and after, as `rms_norm` does."""
    weight = tl.load(weight_ptrs, mask=is_in, other=0.0)
    return (x.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)
