"""`layer_norm` on a GPU: one program sums one row, always in the same order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.rms_norm.gpu import num_warps


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """See `octavo.kernels.layer_norm.layer_norm`."""
    rows_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    num_tokens, width = rows_TD.shape
    out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    block = triton.next_power_of_2(width)
    if num_tokens:
        _layer_norm_kernel[(num_tokens,)](
            rows_TD,
            weight_D.contiguous(),
            bias_D.contiguous(),
            out_TD,
            eps,
            rows_TD.stride(0),
            WIDTH=width,
            BLOCK=block,
            num_warps=num_warps(block),
        )
    return out_TD


@triton.jit
def _layer_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, eps, token_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_in = columns < WIDTH
    x = tl.load(x_ptr + token * token_stride + columns, mask=is_in, other=0.0).to(tl.float32)
    centered = tl.where(is_in, x - tl.sum(x) / WIDTH, 0.0)
    inverse = tl.rsqrt(tl.sum(centered * centered) / WIDTH + eps)
    weight = tl.load(weight_ptr + columns, mask=is_in, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=is_in, other=0.0).to(tl.float32)
    out = (centered * inverse * weight + bias).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * WIDTH + columns, out, mask=is_in)
