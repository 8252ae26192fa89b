"""`causal_conv1d` on a GPU: a program computes rows of a request for some channels, each number by itself.

The programs of a request share its rows. Only the first of them sees its state: it reads what its own first rows need,
and writes the new state when it has read all of the old one, so source and destination may be the same.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.recurrence import DeviceSlots, Slots

_ROWS, _CHANNELS = 4, 128
"""Rows and channels of a tile, which one warp computes. A decode has one row."""
_MAX_PARTS = 64
"""Programs that share the rows of a request."""


def causal_conv1d(
    x_TD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    state_SKD: Tensor,
    slots: Slots,
    *,
    has_silu: bool,
) -> Tensor:
    """See `octavo.kernels.causal_conv1d.causal_conv1d`."""
    assert isinstance(slots, DeviceSlots)
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    num_tokens, channels = x_TD.shape
    num_requests, width = slots.num_requests, weight_DW.shape[1]
    out_TD = torch.empty(num_tokens, channels, dtype=x_TD.dtype, device=x_TD.device)
    # How many programs share the rows of a request changes no bit. In a step of decodes each request has one row.
    num_parts = 1 if num_tokens <= num_requests else min(triton.cdiv(num_tokens, _ROWS), _MAX_PARTS)
    if num_requests:
        _causal_conv1d_kernel[(triton.cdiv(channels, _CHANNELS), num_parts, num_requests)](
            x_TD,
            weight_DW,
            bias_D,
            state_SKD,
            out_TD,
            slots.query_starts_Q,
            slots.sources_R,
            slots.destinations_R,
            channels,
            x_TD.stride(0),
            weight_DW.stride(0),
            weight_DW.stride(1),
            state_SKD.stride(0),
            WIDTH=width,
            HAS_SILU=has_silu,
            ROWS=_ROWS,
            CHANNELS=_CHANNELS,
            KEPT=triton.next_power_of_2(width - 1),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return out_TD


@triton.jit  # long: arguments take a line each
def _causal_conv1d_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    out_ptr,
    starts_ptr,
    sources_ptr,
    destinations_ptr,
    channels,
    x_stride,
    weight_stride,
    tap_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    HAS_SILU: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Program (c, p, r) computes block c of the channels, for every n-th tile of rows of request r, from tile p on.

    The first WIDTH - 1 rows of a request also read the state: the last WIDTH - 1 inputs of the step before.
    """
    part, request = tl.program_id(1), tl.program_id(2)
    start, end = tl.load(starts_ptr + request), tl.load(starts_ptr + request + 1)
    num_rows = (end - start).to(tl.int32)
    columns = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_in = columns < channels
    source = tl.load(sources_ptr + request)
    has_state = (part == 0) & (source >= 0)
    x_ptr += start * x_stride
    old_ptr = state_ptr + source * slot_stride
    for first in range(part * ROWS, num_rows, tl.num_programs(1) * ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]
        is_row = (rows < num_rows) & is_in[None, :]
        sums = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
        if bias_ptr is not None:
            sums += tl.load(bias_ptr + columns, mask=is_in, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(WIDTH):
            inputs = rows + (tap - (WIDTH - 1))
            x = tl.load(
                x_ptr + inputs.to(tl.int64) * x_stride + columns[None, :], mask=is_row & (inputs >= 0), other=0.0
            )
            kept = tl.load(
                old_ptr + (inputs + (WIDTH - 1)) * channels + columns[None, :],
                mask=is_row & (inputs < 0) & has_state,
                other=0.0,
            )
            weight = tl.load(weight_ptr + columns * weight_stride + tap * tap_stride, mask=is_in, other=0.0)
            sums = tl.fma(weight.to(tl.float32)[None, :], tl.where(inputs < 0, kept, x.to(tl.float32)), sums)
        if HAS_SILU:
            sums = sums / (1.0 + tl.exp(-sums))
        out = (start + rows) * channels + columns[None, :]
        tl.store(out_ptr + out, sums.to(out_ptr.dtype.element_ty), mask=is_row)
    destination = tl.load(destinations_ptr + request)
    if (part == 0) & (num_rows > 0) & (destination >= 0):
        places = tl.arange(0, KEPT)[:, None]
        inputs = num_rows + places - (WIDTH - 1)
        is_kept = (places < WIDTH - 1) & is_in[None, :]
        x = tl.load(x_ptr + inputs.to(tl.int64) * x_stride + columns[None, :], mask=is_kept & (inputs >= 0), other=0.0)
        kept = tl.load(
            old_ptr + (inputs + (WIDTH - 1)) * channels + columns[None, :],
            mask=is_kept & (inputs < 0) & has_state,
            other=0.0,
        )
        tl.debug_barrier()  # all threads have read the old state
        new = tl.where(inputs < 0, kept, x.to(tl.float32))
        tl.store(state_ptr + destination * slot_stride + places * channels + columns[None, :], new, mask=is_kept)
