"""`rms_norm` on a GPU: one program sums one row, always in the same order."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See `octavo.kernels.rms_norm.rms_norm`."""
    rows_TNH = x.unsqueeze(1) if x.ndim == 2 else x
    if rows_TNH.ndim != 3 or rows_TNH.stride(2) != 1:
        rows_TNH = x.reshape(-1, 1, x.shape[-1]).contiguous()
    num_tokens, num_heads, width = rows_TNH.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    if out.numel():
        _rms_norm_kernel[(num_tokens, num_heads)](
            rows_TNH,
            weight_D.contiguous(),
            out,
            eps,
            rows_TNH.stride(0),
            rows_TNH.stride(1),
            WIDTH=width,
            BLOCK=block,
            num_warps=num_warps(block),
        )
    return out


def num_warps(block: int) -> int:
    """Return the warps of a program that sums `block` numbers; a function of the width alone, as bits depend on it."""
    return min(max(block // 512, 1), 8)


@triton.jit
def normalized(x, weight, eps, WIDTH: tl.constexpr):
    """Return the norm of one row in its dtype; elements past its width are 0."""
    x32 = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x32 * x32) / WIDTH + eps)
    return ((x32 * inverse).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, eps, token_stride, head_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_in = columns < WIDTH
    x = tl.load(x_ptr + token * token_stride + head * head_stride + columns, mask=is_in, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=is_in, other=0.0)
    out = (token * tl.num_programs(1) + head) * WIDTH + columns
    tl.store(out_ptr + out, normalized(x, weight, eps, WIDTH), mask=is_in)
