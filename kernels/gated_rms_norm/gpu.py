"""`gated_rms_norm` on a GPU: one program sums one part of a row, always in the same order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.dispatch import UnsupportedDevice
from octavo.kernels.rms_norm.gpu import num_warps


def gated_rms_norm(
    x_TD: Tensor,
    gate_TD: Tensor,
    weight: Tensor,
    eps: float,
    *,
    num_groups: int,
    is_gate_first: bool,
    num_segments: int,
    sums_TR: Tensor | None,
) -> Tensor:
    """See `octavo.kernels.gated_rms_norm.gated_rms_norm`.

    Ranks on GPUs do not divide groups, so there is no order of sums that they share: `num_segments` changes nothing.
    """
    if sums_TR is not None:
        raise UnsupportedDevice("gated_rms_norm on GPUs needs whole groups, not the sums of several ranks")
    x_TD, gate_TD = (part if part.stride(1) == 1 else part.contiguous() for part in (x_TD, gate_TD))
    num_tokens, width = x_TD.shape
    out_TD = torch.empty(num_tokens, width, dtype=x_TD.dtype, device=x_TD.device)
    block = triton.next_power_of_2(width // num_groups)
    if num_tokens:
        _gated_rms_norm_kernel[(num_tokens, num_groups)](
            x_TD,
            gate_TD,
            weight,
            out_TD,
            eps,
            x_TD.stride(0),
            gate_TD.stride(0),
            WIDTH=width // num_groups,
            IS_SHARED=len(weight) < width,
            IS_GATE_FIRST=is_gate_first,
            BLOCK=block,
            num_warps=num_warps(block),
            enable_fp_fusion=False,
        )
    return out_TD


@triton.jit
def _gated_rms_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    eps,
    x_stride,
    gate_stride,
    WIDTH: tl.constexpr,
    IS_SHARED: tl.constexpr,
    IS_GATE_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (t, g) normalizes group g of row t. IS_SHARED: all groups have the same weights."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    is_in = columns < WIDTH
    places = group * WIDTH + columns
    x = tl.load(x_ptr + token * x_stride + places, mask=is_in, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + places, mask=is_in, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + (columns if IS_SHARED else places), mask=is_in, other=0.0).to(tl.float32)
    silu = gate / (1.0 + tl.exp(-gate))
    if IS_GATE_FIRST:
        x *= silu
    x = x * tl.rsqrt(tl.sum(x * x) / WIDTH + eps) * weight
    if not IS_GATE_FIRST:
        x *= silu
    out = token * (tl.num_programs(1) * WIDTH) + places
    tl.store(out_ptr + out, x.to(out_ptr.dtype.element_ty), mask=is_in)
