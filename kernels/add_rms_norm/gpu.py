"""`add_rms_norm` on a GPU: one program adds and sums one row, and gives the bits of `add` and `rms_norm`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.all_reduce.pending import PendingSum
from octavo.kernels.programmatic_launch import launch_options
from octavo.kernels.programmatic_launch.gpu import begin
from octavo.kernels.rms_norm.gpu import normalized, num_warps


def add_rms_norm(x_TD: Tensor, update_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.add_rms_norm.add_rms_norm`."""
    if isinstance(update_TD, PendingSum):
        return update_TD.add_rms_norm(x_TD, weight_D, eps)
    x, update = x_TD.contiguous(), update_TD.contiguous()
    sum_TD, out_TD = torch.empty_like(x), torch.empty_like(x)
    num_tokens, width = x.shape
    block = triton.next_power_of_2(width)
    if num_tokens:
        _add_rms_norm_kernel[(num_tokens,)](
            x,
            update,
            weight_D.contiguous(),
            sum_TD,
            out_TD,
            eps,
            WIDTH=width,
            BLOCK=block,
            num_warps=num_warps(block),
            **launch_options(),
        )
    return sum_TD, out_TD


@triton.jit
def _add_rms_norm_kernel(
    x_ptr,
    update_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * WIDTH
    columns = tl.arange(0, BLOCK)
    is_in = columns < WIDTH
    x = tl.load(x_ptr + row + columns, mask=is_in, other=0.0).to(tl.float32)
    update = tl.load(update_ptr + row + columns, mask=is_in, other=0.0).to(tl.float32)
    total = (x + update).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row + columns, total, mask=is_in)
    weight = tl.load(weight_ptr + columns, mask=is_in, other=0.0)
    out = normalized(total, weight, eps, WIDTH)
    tl.store(out_ptr + row + columns, out, mask=is_in)
