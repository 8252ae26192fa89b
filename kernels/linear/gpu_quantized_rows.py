"""Quantizes the rows of `gpu_quantized` to int8 or float8_e4m3fn, with one scale per row or per group of inputs.

The result of a row does not depend on other rows. Rows of products on the CPU are quantized by
`octavo.kernels.quantize`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.programmatic_launch import launch_options
from octavo.kernels.programmatic_launch.gpu import begin
from octavo.kernels.quantize.scaling import SMALLEST_RECIPROCAL, Scaling

_BLOCK = 1024
_GROUPS = 8
"""Groups that one program quantizes."""
_LIMITS = {torch.int8: (-128.0, 127.0), torch.float8_e4m3fn: (-448.0, 448.0)}
_DIVISORS = {torch.int8: 127.5, torch.float8_e4m3fn: 448.0}
"""The scale is the largest magnitude divided by this number."""


def quantize_rows(
    x_TI: Tensor,
    dtype: torch.dtype,
    *,
    group_size: int = 0,
    scale: float | None = None,
    scaling: Scaling = "range",
) -> tuple[Tensor, Tensor]:
    """Return the rows in 8 bits, and their scales: float32, by row and group.

    Args:
        x_TI: rows whose columns are contiguous.
        dtype: int8 or float8_e4m3fn.
        group_size: inputs that share a scale, a power of 2; 0 means all inputs of a row.
        scale: static scale of all rows; larger numbers are clamped. `None`: scales follow from the magnitudes.
        scaling: scaling for int8. A scale for float8_e4m3fn is largest magnitude / largest number of the dtype.
    """
    num_rows, num_inputs = x_TI.shape
    num_groups = -(-num_inputs // group_size) if group_size else 1
    codes_TI = torch.empty(num_rows, num_inputs, dtype=dtype, device=x_TI.device)
    scale_TG = torch.empty(num_rows, num_groups, dtype=torch.float32, device=x_TI.device)
    groups_block = _GROUPS if group_size else 1
    if codes_TI.numel():
        _quantize_kernel[(num_rows, triton.cdiv(num_groups, groups_block))](
            x_TI,
            codes_TI,
            scale_TG,
            1.0 if scale is None else scale,
            num_inputs,
            num_groups,
            group_size or num_inputs,
            x_TI.stride(0),
            HAS_SCALE=scale is not None,
            DIVISOR=_DIVISORS[dtype],
            LOWEST=_LIMITS[dtype][0],
            LARGEST=_LIMITS[dtype][1],
            IS_INTEGER=dtype == torch.int8,
            HAS_QUOTIENTS=dtype == torch.int8 and scaling == "range",
            SMALLEST=SMALLEST_RECIPROCAL if dtype == torch.int8 and scaling == "reciprocal" else 0.0,
            GROUPS=groups_block,
            BLOCK=group_size or _BLOCK,
            # A fused multiply-add would round once, but the levels are defined with two roundings.
            enable_fp_fusion=False,
            **launch_options(),
        )
    return codes_TI, scale_TG


@triton.jit
def _quantize_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    static_scale,
    num_inputs,
    num_groups,
    group_size,
    row_stride,
    HAS_SCALE: tl.constexpr,
    DIVISOR: tl.constexpr,
    LOWEST: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    HAS_QUOTIENTS: tl.constexpr,
    SMALLEST: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Quantize some groups of a row. If a number of a group is not finite, the scale is NaN, and so are the results."""
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    first = (groups * group_size)[:, None] + tl.arange(0, BLOCK)[None, :]
    one = tl.full([GROUPS], 1.0, tl.float32)
    is_finite = one > 0.0
    scale = one * static_scale
    if not HAS_SCALE:
        largest = tl.zeros([GROUPS, BLOCK], tl.float32)
        num_infinite = tl.zeros([GROUPS, BLOCK], tl.int32)
        for start in range(0, group_size, BLOCK):
            columns = first + start
            x = tl.load(x_ptr + row * row_stride + columns, mask=columns < num_inputs, other=0.0).to(tl.float32)
            num_infinite |= (tl.abs(x) < float("inf")).to(tl.int32) ^ 1
            largest = tl.maximum(largest, tl.abs(x))
        is_finite = tl.max(num_infinite, axis=1) == 0
        scale = tl.maximum(tl.div_rn(tl.max(largest, axis=1), one * DIVISOR), SMALLEST)
    inverse = tl.where(is_finite & (scale > 0.0), tl.div_rn(one, scale), 0.0)
    for start in range(0, group_size, BLOCK):
        columns = first + start
        is_in = columns < num_inputs
        x = tl.load(x_ptr + row * row_stride + columns, mask=is_in, other=0.0).to(tl.float32)
        if HAS_QUOTIENTS:
            quotients = tl.div_rn(x, tl.where(scale > 0.0, scale, 1.0)[:, None] + tl.zeros_like(x))
            scaled = tl.where(is_finite[:, None], quotients, 0.0)
        else:
            scaled = tl.where(is_finite[:, None], x * inverse[:, None], 0.0)
        scaled = tl.minimum(tl.maximum(scaled, LOWEST), LARGEST)
        if IS_INTEGER:  # 12582912 is 1.5 * 2^23: the sum has no fraction bits, so it is rounded, ties to even
            scaled = (scaled + 12582912.0) - 12582912.0
        tl.store(codes_ptr + row * num_inputs + columns, scaled.to(codes_ptr.dtype.element_ty), mask=is_in)
    tl.store(scale_ptr + row * num_groups + groups, tl.where(is_finite, scale, float("nan")), mask=groups < num_groups)
