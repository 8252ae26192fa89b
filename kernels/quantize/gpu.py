"""`quantize` on a GPU: one program quantizes one row, group by group, with the same levels as on the CPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.dispatch import require
from octavo.kernels.quantize.cpu import SMALLEST, SMALLEST_RECIPROCAL
from octavo.kernels.quantize.scaling import SCALINGS, Scaling

_BLOCK = 1024
"""Columns that are loaded at a time."""


def quantize(
    x_TI: Tensor, group_size: int, scaling: Scaling = "magnitude", static_scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `octavo.kernels.quantize.quantize`; returns levels, scales and sums. Group sizes are powers of 2."""
    require(scaling != "int12", "quantize: GPUs round rows to 8 bits only")
    rows_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    num_tokens, width = rows_TI.shape
    num_groups = triton.cdiv(width, group_size)
    levels_TI = torch.empty(num_tokens, num_groups * group_size, dtype=torch.int8, device=x_TI.device)
    scale_TG = torch.empty(num_tokens, num_groups, dtype=torch.float32, device=x_TI.device)
    sum_TG = torch.empty(num_tokens, num_groups, dtype=torch.int32, device=x_TI.device)
    groups_block = max(_BLOCK // group_size, 1)
    if levels_TI.numel():
        _quantize_kernel[(num_tokens, triton.cdiv(num_groups, groups_block))](
            rows_TI,
            levels_TI,
            scale_TG,
            sum_TG,
            width,
            num_groups,
            rows_TI.stride(0),
            static_scale or 0.0,
            SCALING=SCALINGS.index(scaling),
            IS_STATIC=static_scale is not None,
            GROUP_SIZE=group_size,
            GROUPS_BLOCK=groups_block,
            SMALLEST=SMALLEST,
            SMALLEST_RECIPROCAL=SMALLEST_RECIPROCAL,
            # A fused multiply-add would round once, but the levels are defined with two roundings.
            enable_fp_fusion=False,
        )
    return levels_TI, scale_TG, sum_TG


@triton.jit
def _quantize_kernel(
    x_ptr,
    levels_ptr,
    scale_ptr,
    sum_ptr,
    width,
    num_groups,
    token_stride,
    static_scale,
    SCALING: tl.constexpr,
    IS_STATIC: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    SMALLEST: tl.constexpr,
    SMALLEST_RECIPROCAL: tl.constexpr,
):
    """Quantize some groups of a row; `SCALING` is an index in `SCALINGS`."""
    token = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS_BLOCK + tl.arange(0, GROUPS_BLOCK)
    is_group = groups < num_groups
    columns = groups[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    x = tl.load(x_ptr + token * token_stride + columns, mask=columns < width, other=0.0).to(tl.float32)
    is_finite = tl.max((tl.abs(x) < float("inf")).to(tl.int32) ^ 1, axis=1) == 0
    magnitude = tl.where(is_finite, tl.max(tl.abs(x), axis=1), 0.0)
    one = tl.full([GROUPS_BLOCK], 1.0, tl.float32)
    if SCALING == 0 and not IS_STATIC:
        scale = tl.div_rn(magnitude, one * 127.0)
        scaled = x * tl.where(magnitude >= SMALLEST, tl.div_rn(one * 127.0, magnitude), 0.0)[:, None]
    elif SCALING != 1:
        scale = one * static_scale if IS_STATIC else tl.maximum(tl.div_rn(magnitude, one * 127.5), SMALLEST_RECIPROCAL)
        scaled = x * tl.div_rn(one, scale)[:, None]
    else:
        scale = one * static_scale if IS_STATIC else tl.div_rn(magnitude, one * 127.5)
        divisor = tl.where(scale >= SMALLEST, scale, float("inf"))
        scaled = tl.div_rn(x, divisor[:, None] + tl.zeros_like(x))
    scaled = tl.where(is_finite[:, None], tl.minimum(tl.maximum(scaled, -128.0), 127.0), 0.0)
    # 1.5 * 2^23: the sum has no fraction bits, so it is rounded, ties to even.
    levels = (scaled + 12582912.0) - 12582912.0
    scale = tl.where(is_finite, scale, float("nan"))
    out = token * num_groups + groups
    tl.store(levels_ptr + token * num_groups * GROUP_SIZE + columns, levels.to(tl.int8), mask=is_group[:, None])
    tl.store(scale_ptr + out, scale, mask=is_group)
    tl.store(sum_ptr + out, tl.sum(levels.to(tl.int32), axis=1), mask=is_group)
