"""`selective_scan` on a GPU: a program takes some columns of a head of a request, and all rows, one after another.

Its part of the state is in registers from the first row to the last, and its size depends on the shape of a state
alone. So the chunks of a prompt and the batch change no bit, as on a CPU (ADR 34).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu_recurrence import softplus, tile_columns
from octavo.kernels.recurrence import DeviceSlots, Slots
from octavo.kernels.selective_scan.weights import ScanWeights


def selective_scan(
    x_TP: Tensor,
    b_TN: Tensor,
    c_TN: Tensor,
    dt_TH: Tensor,
    weights: ScanWeights,
    state_SHNP: Tensor,
    slots: Slots,
) -> Tensor:
    """See `octavo.kernels.selective_scan.selective_scan`."""
    assert isinstance(slots, DeviceSlots)
    x_TP, b_TN, c_TN, dt_TH = (part if part.stride(1) == 1 else part.contiguous() for part in (x_TP, b_TN, c_TN, dt_TH))
    num_heads, state_size, head_dim = state_SHNP.shape[1:]
    out_TP = torch.empty(x_TP.shape, dtype=x_TP.dtype, device=x_TP.device)
    block_p = tile_columns(state_size, head_dim)
    if slots.num_requests:
        _selective_scan_kernel[(triton.cdiv(head_dim, block_p), num_heads, slots.num_requests)](
            x_TP,
            b_TN,
            c_TN,
            dt_TH,
            out_TP,
            weights.a_log_H,
            weights.dt_bias_H,
            weights.skip_H,
            state_SHNP,
            slots.query_starts_Q,
            slots.sources_R,
            slots.destinations_R,
            weights.dt_min,
            weights.dt_max,
            *(part.stride(0) for part in (x_TP, b_TN, c_TN, dt_TH)),
            state_SHNP.stride(0),
            HEAD_DIM=head_dim,
            STATE_SIZE=state_size,
            HEADS_PER_GROUP=num_heads * state_size // b_TN.shape[1],
            BLOCK_N=triton.next_power_of_2(state_size),
            BLOCK_P=block_p,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return out_TP


@triton.jit  # long: arguments take a line each
def _selective_scan_kernel(
    x_ptr,
    b_ptr,
    c_ptr,
    dt_ptr,
    out_ptr,
    a_log_ptr,
    dt_bias_ptr,
    skip_ptr,
    state_ptr,
    starts_ptr,
    sources_ptr,
    destinations_ptr,
    dt_min,
    dt_max,
    x_stride,
    b_stride,
    c_stride,
    dt_stride,
    slot_stride,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Program (c, h, r) computes block c of the columns of head h, for all rows of request r in order.

    `sources`, `destinations`: slot of each request's state before and after this step; if negative, the state begins
    with zeros, or is not stored.
    """
    head, request = tl.program_id(1), tl.program_id(2)
    start, end = tl.load(starts_ptr + request), tl.load(starts_ptr + request + 1)
    if start == end:
        return
    columns, places = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    is_column, is_place = columns < HEAD_DIM, places < STATE_SIZE
    a = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    dt_bias, skip = tl.load(dt_bias_ptr + head).to(tl.float32), tl.load(skip_ptr + head).to(tl.float32)
    numbers = (head * STATE_SIZE + places[:, None]) * HEAD_DIM + columns[None, :]
    is_number = is_place[:, None] & is_column[None, :]
    source, destination = tl.load(sources_ptr + request), tl.load(destinations_ptr + request)
    state = tl.load(state_ptr + source * slot_stride + numbers, mask=is_number & (source >= 0), other=0.0)
    x_ptr += head * HEAD_DIM + columns
    b_ptr += head // HEADS_PER_GROUP * STATE_SIZE + places
    c_ptr += head // HEADS_PER_GROUP * STATE_SIZE + places
    next_x = tl.load(x_ptr + start * x_stride, mask=is_column, other=0.0)
    next_b = tl.load(b_ptr + start * b_stride, mask=is_place, other=0.0)
    next_c = tl.load(c_ptr + start * c_stride, mask=is_place, other=0.0)
    next_dt = tl.load(dt_ptr + start * dt_stride + head)
    for row in range(start, end):
        x, b, c = next_x.to(tl.float32), next_b.to(tl.float32), next_c.to(tl.float32)
        dt = softplus(next_dt.to(tl.float32) + dt_bias)
        # Load the next row while this one is computed.
        following = tl.minimum(row + 1, end - 1)
        next_x = tl.load(x_ptr + following * x_stride, mask=is_column, other=0.0)
        next_b = tl.load(b_ptr + following * b_stride, mask=is_place, other=0.0)
        next_c = tl.load(c_ptr + following * c_stride, mask=is_place, other=0.0)
        next_dt = tl.load(dt_ptr + following * dt_stride + head)
        dt = tl.minimum(tl.maximum(dt, dt_min), dt_max)
        state = tl.fma(b[:, None], (x * dt)[None, :], state * tl.exp(a * dt))
        y = tl.fma(x, skip, tl.sum(state * c[:, None], axis=0))
        out = row * (tl.num_programs(1) * HEAD_DIM) + head * HEAD_DIM + columns
        tl.store(out_ptr + out, y.to(out_ptr.dtype.element_ty), mask=is_column)
    if destination >= 0:
        tl.store(state_ptr + destination * slot_stride + numbers, state, mask=is_number)
