"""`gated_delta_rule` on a GPU: a program takes some columns of a head of a request, and all rows, one after another.

Its part of the state is in registers from the first row to the last, and its size depends on the shape of a state
alone. So the chunks of a prompt and the batch change no bit, as on a CPU (ADR 34).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gated_delta_rule.weights import NORM_EPS, DeltaWeights
from octavo.kernels.gpu_recurrence import softplus, tile_columns
from octavo.kernels.recurrence import DeviceSlots, Slots

_NORM_EPS = tl.constexpr(NORM_EPS)


def gated_delta_rule(
    q_TK: Tensor,
    k_TK: Tensor,
    v_TV: Tensor,
    b_TH: Tensor,
    a_TH: Tensor,
    weights: DeltaWeights,
    state_SHKV: Tensor,
    slots: Slots,
) -> Tensor:
    """See `octavo.kernels.gated_delta_rule.gated_delta_rule`."""
    assert isinstance(slots, DeviceSlots)
    rows = [part if part.stride(1) == 1 else part.contiguous() for part in (q_TK, k_TK, v_TV, b_TH, a_TH)]
    num_heads, key_dim, value_dim = state_SHKV.shape[1:]
    out_TV = torch.empty(v_TV.shape, dtype=v_TV.dtype, device=v_TV.device)
    block_v = tile_columns(key_dim, value_dim)
    if slots.num_requests:
        _gated_delta_rule_kernel[(triton.cdiv(value_dim, block_v), num_heads, slots.num_requests)](
            *rows,
            out_TV,
            weights.a_log_H,
            weights.dt_bias_H,
            state_SHKV,
            slots.query_starts_Q,
            slots.sources_R,
            slots.destinations_R,
            key_dim**-0.5,
            *(part.stride(0) for part in rows),
            state_SHKV.stride(0),
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            HEADS_PER_KEY=num_heads * key_dim // q_TK.shape[1],
            BLOCK_K=triton.next_power_of_2(key_dim),
            BLOCK_V=block_v,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return out_TV


@triton.jit  # long: arguments take a line each
def _gated_delta_rule_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    b_ptr,
    a_ptr,
    out_ptr,
    a_log_ptr,
    dt_bias_ptr,
    state_ptr,
    starts_ptr,
    sources_ptr,
    destinations_ptr,
    scale,
    q_stride,
    k_stride,
    v_stride,
    b_stride,
    a_stride,
    slot_stride,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (c, h, r) computes block c of the value columns of head h, for all rows of request r in order.

    `sources`, `destinations`: slot of each request's state before and after this step; if negative, the state begins
    with zeros, or is not stored.
    """
    head, request = tl.program_id(1), tl.program_id(2)
    start, end = tl.load(starts_ptr + request), tl.load(starts_ptr + request + 1)
    if start == end:
        return
    columns, places = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_K)
    is_column, is_place = columns < VALUE_DIM, places < KEY_DIM
    a_scale = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    numbers = (head * KEY_DIM + places[:, None]) * VALUE_DIM + columns[None, :]
    is_number = is_place[:, None] & is_column[None, :]
    source, destination = tl.load(sources_ptr + request), tl.load(destinations_ptr + request)
    state = tl.load(state_ptr + source * slot_stride + numbers, mask=is_number & (source >= 0), other=0.0)
    q_ptr += head // HEADS_PER_KEY * KEY_DIM + places
    k_ptr += head // HEADS_PER_KEY * KEY_DIM + places
    v_ptr += head * VALUE_DIM + columns
    next_q = tl.load(q_ptr + start * q_stride, mask=is_place, other=0.0)
    next_k = tl.load(k_ptr + start * k_stride, mask=is_place, other=0.0)
    next_v = tl.load(v_ptr + start * v_stride, mask=is_column, other=0.0)
    next_b, next_a = tl.load(b_ptr + start * b_stride + head), tl.load(a_ptr + start * a_stride + head)
    for row in range(start, end):
        q, k, v = next_q.to(tl.float32), next_k.to(tl.float32), next_v.to(tl.float32)
        beta = 1.0 / (1.0 + tl.exp(-next_b.to(tl.float32)))
        dt = softplus(next_a.to(tl.float32) + dt_bias)
        # Load the next row while this one is computed.
        following = tl.minimum(row + 1, end - 1)
        next_q = tl.load(q_ptr + following * q_stride, mask=is_place, other=0.0)
        next_k = tl.load(k_ptr + following * k_stride, mask=is_place, other=0.0)
        next_v = tl.load(v_ptr + following * v_stride, mask=is_column, other=0.0)
        next_b, next_a = tl.load(b_ptr + following * b_stride + head), tl.load(a_ptr + following * a_stride + head)
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + _NORM_EPS) * scale
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + _NORM_EPS)
        state *= tl.exp(a_scale * dt)
        update = (v - tl.sum(state * k[:, None], axis=0)) * beta
        state = tl.fma(k[:, None], update[None, :], state)
        y = tl.sum(state * q[:, None], axis=0)
        out = row * (tl.num_programs(1) * VALUE_DIM) + head * VALUE_DIM + columns
        tl.store(out_ptr + out, y.to(out_ptr.dtype.element_ty), mask=is_column)
    if destination >= 0:
        tl.store(state_ptr + destination * slot_stride + numbers, state, mask=is_number)
